"""Workload `graphmamba`: Graph-Mamba (arXiv:2402.00789), and Graph Mamba Networks (arXiv:2402.08678) as presets named walks.

Sizes, batches, learning rates and weight decays are those of the first paper's configurations
(github.com/bowang-lab/Graph-Mamba, configs/Mamba).
"""

from dataclasses import replace

from .graph_model import WALKS, GraphModel, GraphSizes, graph_loss
from .graph_padding import count, fill_up
from .graphs import MALNET_TINY, MNIST, PEPTIDES_FUNC, VOC_SP, collate, load_graphs
from .registry import Preset, Workload

_PEPTIDES = GraphSizes(PEPTIDES_FUNC, d_model=96, layers=4, headdim=32)
_TINY = GraphSizes(replace(PEPTIDES_FUNC, nodes=(60, 160)), d_model=32, layers=2, headdim=16, chunk_size=32)


def _walks(sizes: GraphSizes) -> GraphSizes:
    return replace(sizes, tokens=WALKS)


WORKLOAD = Workload(
    "graphmamba",
    presets={
        "tiny": Preset(_TINY, batch=8, lr=2e-2, weight_decay=0.01),
        "tiny-walks": Preset(_walks(_TINY), batch=8, lr=2e-2, weight_decay=0.01),
        "peptides-func": Preset(_PEPTIDES, batch=128, lr=1e-3, weight_decay=0.01),
        "peptides-func-walks": Preset(_walks(_PEPTIDES), batch=128, lr=1e-3, weight_decay=0.01),
        "mnist": Preset(GraphSizes(MNIST, d_model=52, layers=3, headdim=26, head_layers=3), batch=16, lr=5e-3,
                        weight_decay=0.01),
        "voc-sp": Preset(GraphSizes(VOC_SP, d_model=96, layers=4, headdim=32, head_layers=3), batch=32, lr=1.5e-3,
                         weight_decay=1e-3),
        "malnet-tiny": Preset(GraphSizes(MALNET_TINY, d_model=64, layers=5, headdim=32, pooling="max", head_layers=3), batch=16,
                              lr=1.5e-3, weight_decay=1e-5),
    },
    build=GraphModel,
    dataset=lambda run: load_graphs(run.data, run.sizes, run.seed),
    loss=graph_loss,
    collate=collate,
    count=count,
    fill_up=fill_up,
    unit="graphs",
    mixers=("mamba1", "ssd"),
)
