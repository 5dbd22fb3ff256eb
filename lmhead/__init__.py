"""The LM head for models whose attention is data-parallel: one all-to-all, reassembled in place.

    LMHead           the head as a module: own rows in, their logits over the whole vocabulary out
    exchange         the same exchange under a caller's own GEMM
    Workspace        kept buffers for `exchange`
    CollectiveError  what a failed or timed-out collective raises

Importing this registers torch.ops.lmhead.logits and torch.ops.lmhead.exchange; it touches no device
and no group.
"""

from lmhead.comm import CollectiveError
from lmhead.head import VERSION as __version__
from lmhead.head import LMHead, exchange
from lmhead.workspace import Workspace

__all__ = ["CollectiveError", "LMHead", "Workspace", "__version__", "exchange"]
