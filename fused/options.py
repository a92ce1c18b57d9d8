"""The switches that `fused` declares. `persistent` knows some of them, too; each variant lists its own in `Variant.options`."""

OPTIONS = {
    "exp2": "Take exponentials as exp2 of exponents that were scaled by log2(e) as vectors. Off, exp of each element.",
    "fuse_bmm": "Compute C B^T in the tile that uses it. Off, bmm_chunk writes it to memory once per group.",
    "low_precision_CB": "Without fuse_bmm, keep C B^T in the dtype of x; in fp16 it must be at most 65504. Off, in fp32.",
    "fuse_states": "Walk the chunks in one kernel with the running state in registers. Off, and in plain Triton for few heads "
                   "of a long sequence, run chunk_state and state_passing, through fp32 states in memory.",
    "two_level": "Let a block walk a whole chunk, on Hopper up to 512 tokens, in sub-chunks of 64 with the state in registers. "
                 "Off, let a program have one block of rows, and meet every block of columns before it in its chunk.",
    "causal_blocks": "Without two_level, skip tiles above the diagonal. Off, compute and mask them.",
    "fuse_backward": "Run the backward in sub-chunks of 64 tokens, with one kernel for each of states, their gradients, dC "
                     "with dCB, and dB with dx. Off, run the baseline's.",
    "split_backward": "Run the backward of large inputs whose states were not kept in two halves, so that the states of "
                      "one half are in memory at a time. Off, run it at once.",
    "gluon": "Run warp-specialised Gluon kernels on Hopper, where the inputs allow. They keep a state every 64 tokens, "
             "above a dstate of 128 every 128. Off, run plain Triton everywhere.",
}
