"""What compilers have to know of the head's operators: that they are collectives.

A compiler is free to drop an operator whose result nobody uses, and to move one past another that
it has no link to.  A collective allows neither: the other ranks wait for it, and for it first.  Two
things are said here, both in torch's private words (tried with torch 2.13); where a release does
not know them, its own rule stays, which is the order of the graph for most graphs.

* `mark`, to AOTAutograd: the operator has an effect, in order with other effects.  So it stays in
  the graph, where the program has it.
* `keep_order`, to Inductor: the operator is a collective.  Inductor emits its own collectives
  (torch.ops._c10d_functional) in the order of the graph; an operator that it does not know stays in
  place only as long as nothing is fused around it: a kernel that joins work from before the head
  with work on a later all-reduce's result draws that all-reduce in front of the head.  Ranks whose
  graphs are not the same one (static rows here, dynamic there) would then meet in different orders,
  and wait for each other for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

Operator = torch._ops.OpOverload


def mark(operator: Operator) -> None:
    """Have compilers keep the operator, and keep it where it is."""
    if operator._schema.is_mutable:
        # What declares a mutation takes no effect: it stays where what it mutates is used.
        has_side_effect(operator)
        return
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError:
        return
    _register_effectful_op(operator, _EffectType.ORDERED)


def keep_order(*operators: Operator) -> None:
    """Have Inductor keep the operators in order with its own collectives, if it is loaded."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or all(operator in lowering.lowerings for operator in operators):
        return
    try:
        for operator in operators:
            tag = lowering.get_layout_constraint_tag(operator, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(operator, constraint, warn=False)
            lowering.lowerings[operator] = _as_collective(lowering.lowerings[operator])
    except (AttributeError, ImportError, TypeError):
        return


def _as_collective(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Lower to the same call of the operator, under the class of collectives: the scheduler chains
    that class's instances in the order in which they are lowered.
    """
    from torch._inductor.ir import FallbackKernel, _CollectiveKernel
    from torch._inductor.virtualized import V

    def lower_collective(*args: Any, **kwargs: Any) -> Any:
        before = len(V.graph.operations)
        result = lower(*args, **kwargs)
        for node in V.graph.operations[before:]:
            if type(node) is FallbackKernel:
                node.__class__ = _CollectiveKernel
        return result

    return lower_collective


def untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Where a tracer that gave up on the caller comes in by the back door: one that took the
    collectives apart would leave ranks waiting for one that still compiles.
    """
    # Here and not as a decorator, which would load the compiler (a second) with the package.
    return torch.compiler.disable(function)(*args, **kwargs)
