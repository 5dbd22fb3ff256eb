"""The LM head for models whose attention is data-parallel: one all-to-all, reassembled in place.

    LMHead           the head as a module: own rows in, their logits over the whole vocabulary out
    exchange         the same exchange under a caller's own GEMM
    sample_exchange  the draw of `LMHead.sample` under a caller's own GEMM
    share            what is drawn for own rows, handed to a whole attention group
    Sample           what a draw gives
    ParallelConfig   a deployment's sizes and switches, as engines name them
    decide           which way such a deployment's logits should take, and why
    Layout           how the head's ranks share attention: who holds and who owns which rows
    DecodeGraphs     a decode step replayed from CUDA graphs, one per row bucket
    Workspace        kept buffers for `exchange`
    CollectiveError  what a failed or timed-out collective raises

Importing this registers the operators of torch.ops.lmhead; it touches no device and no group.
"""

from lmhead.comm import CollectiveError
from lmhead.graphs import DecodeGraphs
from lmhead.head import VERSION as __version__
from lmhead.head import LMHead
from lmhead.own_gemm import exchange, sample_exchange, share
from lmhead.policy import ParallelConfig, decide
from lmhead.sampling import Sample
from lmhead.shapes import Layout
from lmhead.workspace import Workspace

__all__ = [
    "CollectiveError",
    "DecodeGraphs",
    "LMHead",
    "Layout",
    "ParallelConfig",
    "Sample",
    "Workspace",
    "__version__",
    "decide",
    "exchange",
    "sample_exchange",
    "share",
]
