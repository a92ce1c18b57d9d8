"""The forward on Hopper, which `fused` and `persistent` take where the inputs allow, and what `hopper_backward` shares with it.
Launches of the Gluon kernels in order:

    stationary: chunk_cumsum, hopper_pieces where sequences are cut, and a scan of all sequences.
    two_level:  chunk_cumsum, hopper_pieces where sequences are cut, hopper_states of all sequences, and a scan of segments of
                up to 512 tokens, whatever chunk_size is.

A scan is hopper_scan, or hopper_wide_scan above a dstate of 128 (but of documents with states).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from ssd.kernels.arguments import cdiv, contiguous
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.kernels.document_blocks import document_blocks
from ssd.runtime.devices import is_hopper
from ssd.runtime.late import includes_late
from ssd.runtime.tables import get_tables
from ssd.runtime.toolchain import copy_descriptor, explain_missing_gluon, get_descriptor_fields
from ssd.runtime.tuning import current_device
from ssd.types import SPAN, SUB_CHUNK, Options, SSDInputs, SSDSaved

from .schedule import choose_two_level_segment, deal, deal_two_level

BLOCK_M = SUB_CHUNK
SLICE = 64  # channels of a head that a warpgroup takes
WIDTHS = 64, 128  # states that a tile may be wide
WIDE = 2 * WIDTHS[-1]  # states of a tile that has both parts of dstate
MOST_HEADDIM, MOST_DSTATE = 2 * SLICE, 2 * WIDTHS[-1]  # a block takes two slices; dstate goes in one part or two
_LEAST_FILLED = 0.125  # of its tiles, by a state: the least that was measured, where these kernels were faster
_MOST_PLACES = 2**31  # of a token and head, in whole sub-chunks
_ALIGNMENT = 16  # bytes, of what a TMA descriptor describes
_MOST_DESCRIBED = 1024  # callers whose sizes never repeat must not fill the memory
_described: dict[tuple, dict] = {}
# options without which these kernels run, too
MAY_BE_OFF = ("low_precision_states", "stationary", "segments", "save_states", "gluon", "fuse_backward", "split_backward",
              "replay")


def cannot_run(i: SSDInputs, options: Options, keeps: bool) -> str | None:
    """Why the plain kernels must run these inputs; None if these can.

    keeps: states, which another backward may have to read at the edges of chunks.
    """
    if not options.gluon:
        return "options.gluon is off"
    if not is_hopper(i.x.device):
        return f"needs a GPU of compute capability 9, got {i.x.device}"
    if reason := explain_missing_gluon():
        return reason
    if i.x.dtype not in (torch.bfloat16, torch.float16) or not i.x.dtype == i.B.dtype == i.C.dtype:
        return f"x, B, C: got dtypes {i.x.dtype}, {i.B.dtype}, {i.C.dtype}, takes bf16 or fp16, all alike"
    if i.z is not None and i.z.itemsize > 4:
        return f"z: got {i.z.dtype}, takes fp32, bf16 or fp16"
    if not has_tiles(i.x.dtype.itemsize, i.headdim, i.dstate):
        return (f"got headdim = {i.headdim}, dstate = {i.dstate}, takes multiples of 8 up to {MOST_HEADDIM} and {MOST_DSTATE} "
                f"that fill an eighth of tiles of {SLICE} channels and {' or '.join(map(str, WIDTHS))} states")
    if i.cu_seqlens is not None and not i.has_document_states:
        return "varlen states of cu_seqlens are not in it"
    if keeps and i.chunk_size % BLOCK_M and not i.has_document_states:
        return f"chunk_size: got {i.chunk_size}, keeps states every {BLOCK_M} tokens or a multiple"
    if i.batch * i.nheads * cdiv(i.seqlen, BLOCK_M) * BLOCK_M >= _MOST_PLACES:
        return f"got batch = {i.batch}, nheads = {i.nheads}, seqlen = {i.seqlen}, counts places of tokens in int32"
    if i.states_dtype.itemsize > 4:
        return f"state_dtype: got {i.states_dtype}, keeps states in fp32, bf16 or fp16"
    if not (options.exp2 and options.fuse_bmm):
        return "options.exp2 and fuse_bmm cannot be off in it"
    return None


def has_tiles(itemsize: int, headdim: int, dstate: int) -> bool:
    """True for the sizes of inputs that these kernels have tiles for, which is not to say that they take all such inputs."""
    if itemsize != 2 or headdim > MOST_HEADDIM or dstate > MOST_DSTATE or headdim % 8 or dstate % 8:
        return False
    return headdim * dstate >= _LEAST_FILLED * cdiv(headdim, SLICE) * SLICE * count_parts(dstate) * get_width(dstate)


def can_run(reason: str | None, variant: str) -> bool:
    """Whether there is no reason why not, of `cannot_run`; one is said to the logger, once: if it is the toolchain's, which no
    other inputs would help, as a warning.
    """
    if reason:
        _say_plain(variant, reason)
    return reason is None


@lru_cache(maxsize=64)
def _say_plain(variant: str, reason: str) -> None:
    level = logging.WARNING if reason == explain_missing_gluon() else logging.INFO
    logging.getLogger("ssd").log(level, "variant %r runs its plain Triton kernels, not those for Hopper: %s", variant, reason)


def writes_asked_states(i: SSDInputs, options: Options, save: bool) -> bool:
    """Whether these kernels, where they run, write `SSDSaved.states`. save: a backward may follow."""
    return i.asks_for_states_alone(options, save) and i.return_states_every % BLOCK_M == 0


def run_stationary(inputs: SSDInputs, options: Options, save: bool, keep: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """As `Variant.forward`, keeping states or not: a block walks two slices through a sequence, or what `deal` cuts of it."""
    with torch.cuda.device_of(inputs.x):
        call = _Call.of(inputs, save)
        final_states, asked = call.new_final_states(), call.new_asked_states(options, save)
        prev_states, every = None, states_every(inputs, options)
        if keep:
            prev_states = call.new_states(inputs.count_states(every))
        # cuts differ, so that outputs with states and without may round otherwise
        runs, *entering = call.get_scan_runs(options, writes=keep or asked is not None)
        call.scan(runs, call.initial_states, *entering, final_states, prev_states, asked, every=every if keep else BLOCK_M)
    return call.out, final_states, SSDSaved(inputs, options, call.y, None, prev_states, asked, call.out)


def explain_no_deferred_norm(i: SSDInputs, options: Options) -> str | None:
    """Why `scan_deferring_norm` must not run these inputs; None if it can."""
    if not options.stationary:
        return "options.stationary cannot be off in it"
    if i.x.dtype != torch.bfloat16:
        return f"x: got dtype {i.x.dtype}, takes bf16: what is not scaled yet may exceed fp16"
    if count_parts(i.dstate) > 1:
        return f"dstate: got {i.dstate}, takes up to {WIDTHS[-1]}"
    if i.has_document_states:
        return "documents with states are not in it"
    return cannot_run(i, options, keeps=False)


def scan_deferring_norm(inputs: SSDInputs, options: Options, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `Variant.scan_deferring_norm`, dealt as `run_stationary` without a backward."""
    with torch.cuda.device_of(inputs.x):
        call = _Call.of(inputs, save=False)
        final_states, slices = call.new_final_states(), inputs.nheads * cdiv(inputs.headdim, SLICE)
        sums = call.out.new_empty(inputs.batch, call.nsub * BLOCK_M, slices, dtype=torch.float32)
        runs, *entering = call.get_scan_runs(options)
        call.scan(runs, call.initial_states, *entering, final_states, norm_weight=weight, sums=sums)
    return call.out, final_states, sums


def run_two_level(inputs: SSDInputs, options: Options, save: bool, keep: bool,
              blocks: int | None = None) -> tuple[Tensor, Tensor, SSDSaved]:
    """As `Variant.forward`, keeping states or not: a block walks two slices through a segment; `blocks`: so many take turns."""
    from .kernels.hopper.states import hopper_states

    i, pairs = inputs, count_pairs(inputs)
    with torch.cuda.device_of(i.x):
        call = _Call.of(i, save)
        device = current_device(i.x.device.index)
        each = choose_two_level_segment(i.batch * pairs, call.nsub, device.sms, device.name)
        # tokens between the states that are written; each segment starts from one
        every = states_every(i, options) if keep else each * BLOCK_M
        final_states, prev_states = call.new_final_states(), call.new_states(cdiv(i.seqlen, every))
        asked = call.new_asked_states(options, save)
        runs, *entering = call.get_runs(options, "every_state_step" if keep else "few_states_step")
        hopper_states(i, call.descriptors[:2], describe_states(prev_states), *call.steps, runs, (call.initial_states, None),
                      *entering, final_states, i.batch, every)
        runs = get_tables(deal_two_level, (i.batch, pairs, call.nsub, each, blocks), i.x.device).sequences
        call.scan(runs, asked=asked, starts=prev_states, every=every)
    return call.out, final_states, SSDSaved(inputs, options, call.y, None, prev_states if keep else None, asked, call.out)


def states_every(i: SSDInputs, options: Options) -> int:
    """Tokens between the states that a forward here keeps: as the backward here reads them, where others can use those, too."""
    every = tokens_between_states(i)
    fits = options.fuse_backward and not i.chunk_size % every and not (i.return_states_every or every) % every
    return every if fits else BLOCK_M


def tokens_between_states(i: SSDInputs) -> int:
    """Tokens between the states that the backward here reads."""
    return SPAN if runs_wide(i) else BLOCK_M


def runs_wide(i: SSDInputs) -> bool:
    """Whether both parts of dstate are taken at once: by hopper_wide_scan, which knows nothing of documents' states, and in the
    backward by spans.
    """
    return count_parts(i.dstate) == 2 and not i.has_document_states


def count_pairs(i: SSDInputs) -> int:
    """Of slices, which a block takes together: two heads of a group, the last of an odd number alone, or one wide head."""
    return i.nheads if i.headdim > SLICE else i.ngroups * cdiv(i.nheads // i.ngroups, 2)


@dataclass(frozen=True)
class _Call:
    """What the launches of one call share. `of` makes every copy first and launches chunk_cumsum last, since the next launch
    may begin beside it.
    """

    inputs: SSDInputs
    out: Tensor
    y: Tensor | None  # out without the gate, where it is kept
    descriptors: tuple  # of x, B, C, out
    gate_descriptors: dict  # of the gate and of what it is applied to, by the names that hopper_scan gives them; or None
    steps: tuple[Tensor, Tensor]  # dt, dA_cumsum (batch, nheads, nsub, 64)
    initial_states: Tensor | None
    blocks: Tensor | None  # of documents with states of their own, in place of sub-chunks

    @classmethod
    def of(cls, i: SSDInputs, save: bool) -> _Call:
        out = torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
        initial_states = contiguous(i.initial_states)
        blocks = document_blocks(i) if i.has_document_states else None
        y = torch.empty_like(out) if i.keeps_y(save) else None
        z = None if i.z is None else describe(make_describable(i.z))
        gate = {"z_desc": z, "y_desc": None if y is None else describe(y)}
        descriptors = (*describe_inputs(i.x, i.B, i.C), describe(out))
        i = replace(i, D=contiguous(i.D))
        steps = chunk_cumsum(replace(i, chunk_size=BLOCK_M), apart=True, blocks=blocks, lets_next=True)
        return cls(i, out, y, descriptors, gate, steps, initial_states, blocks)

    def scan(self, runs: Tensor, initial_states: Tensor | None = None, ends: Tensor | None = None,
             factors: Tensor | None = None, final_states: Tensor | None = None, kept: Tensor | None = None,
             asked: Tensor | None = None, **more) -> None:
        """Launches what scans. kept: the states before every `every` tokens, where they are written; asked: of
        `new_asked_states`; more: as hopper_scan.
        """
        from .kernels.hopper.scan import hopper_scan
        from .kernels.hopper.scan_tiles import COLUMNS
        from .kernels.hopper.wide_scan import QUARTER, hopper_wide_scan

        launch, width, pieces, (x, B, C, out) = hopper_scan, None, {}, self.descriptors
        if runs_wide(self.inputs):
            launch, width, B, C = hopper_wide_scan, QUARTER, describe(B.base, WIDE), describe(C.base, WIDE)
            if ends is not None and ends.dtype == torch.float16:  # a slot of tiles holds those of a piece
                pieces = {"ends_desc": describe_ends(ends)}
        states = {}
        if kept is not None:
            states = {"states_desc": describe_states(kept, width)}
        elif asked is not None and asked.numel():
            states = {"states_desc": describe_states(asked, COLUMNS), "nasked": asked.shape[1]}
        launch(self.inputs, x, B, C, out, *self.steps, runs, initial_states, ends, factors, final_states, **states, **pieces,
               **self.gate_descriptors, **self.document_arguments, **more)

    @property
    def document_arguments(self) -> dict:
        """What hopper_scan takes more for documents with states of their own."""
        return {} if self.blocks is None else {"blocks": self.blocks, "out": self.out, "y": self.y}

    @property
    def nsub(self) -> int:
        return self.steps[0].shape[2]

    def new_states(self, count: int) -> Tensor:
        """So many of each row."""
        i = self.inputs
        return torch.empty(i.batch, count, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=i.states_dtype)

    def new_final_states(self) -> Tensor:
        """Of the rows, or of the documents."""
        i = self.inputs
        ends = i.cu_seqlens.shape[0] - 1 if i.has_document_states else i.batch
        return torch.empty(ends, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)

    def new_asked_states(self, options: Options, save: bool) -> Tensor | None:
        """For the states of `return_states_every`; None where nobody asks, or a backward needs those between them too."""
        i = self.inputs
        if not writes_asked_states(i, options, save):
            return None
        return self.new_states(i.seqlen // i.return_states_every)

    def get_scan_runs(self, options: Options, writes: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Those of a scan of whole sequences. writes: states, too."""
        waits = includes_late([self.initial_states])  # a cut end to end pays only where blocks begin beside the state pass
        return self.get_runs(options, "kept_scan_step" if writes or waits else "scan_step", scan=True)

    def get_runs(self, options: Options, step: str, scan: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        i = self.inputs
        return make_runs(i, i.batch, self.descriptors[:2], *self.steps, i.batch, options, step, scan, self.blocks,
                         (self.initial_states, None))


def make_runs(i: SSDInputs, rows: int, descriptors: tuple, dt: Tensor, dA_cumsum: Tensor, forwards: int,
              options: Options, step: str, scan: bool = False, blocks: Tensor | None = None,
              starts: tuple[Tensor | None, ...] = (None, None)) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs of whole sequences, or cut ones; and ends and factors of the pieces that enter those that begin inside one.

    rows: sequences of a pair of heads, of which those from `forwards` on are walked backwards; descriptors: as hopper_states
    takes them; step: the name of the `Step` in the time model that says what the runs will do; scan: whether they are
    hopper_scan's, which takes the parts of dstate one launch after the other, or hopper_states'. blocks: of documents; starts:
    their initial_states and dfinal_states, contiguous, each or None for zeros.

    The next launch must be that of the runs: it begins beside the state pass. Between chunk_cumsum and this nothing may be
    copied that a role reads before it waits.
    """
    from .kernels.hopper.pieces import hopper_pieces

    device = current_device(i.x.device.index)
    pairs, parts, wide = count_pairs(i), count_parts(i.dstate), runs_wide(i)
    if not scan:
        pairs, parts = pairs * parts, 1
    elif wide:  # a block of the state pass has both slices of a pair and both parts
        parts, descriptors = 1, (descriptors[0], describe(descriptors[1].base, WIDE))
    dealing = rows, pairs, dt.shape[2], device.sms, device.name, step, options.segments, parts
    runs, piece_runs, npieces = get_tables(deal, dealing, i.x.device)
    if not npieces:
        return runs, None, None
    starts = (None, None) if blocks is None else tuple(map(describe_document_states, starts))
    # fp16 is finer than what bf16 makes of operands; walks leave states and gradients that may be exact
    dtype = torch.float16 if scan and i.x.dtype == torch.bfloat16 else torch.float32
    return runs, *hopper_pieces(i, descriptors, dt, dA_cumsum, npieces, piece_runs, forwards, blocks, starts, dtype)


def make_describable(t: Tensor) -> Tensor:
    """t, or a copy where TMA cannot take its strides, which is said to the logger once."""
    if is_describable(t):
        return t
    _say_copy(t.stride(), t.dtype)
    return t.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def _say_copy(strides: tuple[int, ...], dtype: torch.dtype) -> None:
    logging.getLogger("ssd").info("the kernels for Hopper copy a tensor of %s with strides %s: they take heads and channels "
                                  "that are contiguous, and rows that begin on %d bytes", dtype, strides, _ALIGNMENT)


def is_describable(t: Tensor) -> bool:
    """Whether heads and channels are contiguous, and rows apart and on 16 bytes."""
    (batch, seqlen, heads, channels), strides = t.shape, t.stride()
    aligned = not any(stride * t.element_size() % _ALIGNMENT for stride in strides[:2]) and t.data_ptr() % _ALIGNMENT == 0
    apart = (batch == 1 or strides[0] > 0) and (seqlen == 1 or strides[1] >= heads * channels)
    return aligned and apart and strides[3] == 1 and (heads == 1 or strides[2] == channels)


def describe_inputs(x: Tensor, *groups: Tensor, rows: int = BLOCK_M) -> tuple:
    """TMA descriptors of x and of B, C or both, or of copies of them, in tiles of so many tokens."""
    described = (describe(make_describable(t), get_width(t.shape[-1]), rows) for t in groups)
    return describe(make_describable(x), rows=rows), *described


def get_width(dstate: int) -> int:
    """How many states a tile is wide, of a part of dstate."""
    return next((width for width in WIDTHS if dstate <= width), WIDTHS[-1])


def count_parts(dstate: int) -> int:
    """Of dstate, each as wide as a tile."""
    return cdiv(dstate, get_width(dstate))


def describe(t: Tensor, width: int = SLICE, rows: int = BLOCK_M):
    """TMA descriptor of a tensor (batch, seqlen, heads, channels) in tiles of so many tokens and `width` channels of one head.

    It has three dimensions where tiles fill the heads, which are one after the other. Else it has four: then what lies outside
    of a head is neither read nor written.

    The class checks its fields anew for every tensor, which takes as long as a launch; here once for all that are alike.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    key = t.shape, t.stride(), t.dtype, width, rows
    fields = _described.get(key)
    if fields is None:
        batch, seqlen, heads, channels = t.shape
        if channels % width and heads > 1:
            box = [batch, seqlen, heads, channels], [*t.stride()[:2], channels, 1], [1, rows, 1, width]
        else:
            box = [batch, seqlen, heads * channels], [*t.stride()[:2], 1], [1, rows, width]
        # without the tensor, or it would live as long as this
        fields = get_descriptor_fields(TensorDescriptor(t, *box, _get_layout(*box[2], dtype=t.dtype)))
        if len(_described) >= _MOST_DESCRIBED:
            _described.clear()
        _described[key] = fields
    return copy_descriptor(TensorDescriptor, fields, t)


def describe_states(states: Tensor, width: int | None = None):
    """TMA descriptor of contiguous states (..., headdim, dstate) in tiles of a slice of one state, `width` states wide or as
    wide as a part.
    """
    headdim, dstate = states.shape[-2:]
    return describe(states.view(-1, headdim, 1, dstate), width or get_width(dstate))


def describe_ends(ends: Tensor):
    """TMA descriptor of what pieces leave, but for the exponents, in tiles of a slice [64, 256]: in the order of memory."""
    lines = ends.as_strided((ends[..., 0].numel(), SLICE, 1, WIDE), (ends.stride(1), WIDE, WIDE, 1))
    return describe(lines, WIDE)


def describe_document_states(states: Tensor | None, width: int | None = None):
    """As `describe_states`, of any contiguous states, or of a copy that the TMA can take; None of None."""
    if states is None:
        return None
    return describe_states(make_describable(states.float() if states.itemsize > 4 else states), width)


@cache
def _get_layout(*box: int, dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(box), element)
