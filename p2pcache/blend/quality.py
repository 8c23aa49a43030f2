"""How far a prefill with reused KV is from a full one."""

from __future__ import annotations

import torch


def kl_divergence(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) in nats, one value a token: what is lost by answering from Q where P was meant.

    Args:
        p_logits: `[..., vocab]` of the reference (full prefill), any float dtype, unnormalised.
        q_logits: the same shape, of what is judged.

    Returns `[...]` float64, never negative beyond rounding. fp64, since the floor of a lossless
    scheme is near 1e-6 and fp32 log-softmax over 50k words already errs by that much.
    """
    p = torch.log_softmax(p_logits.double(), dim=-1)
    q = torch.log_softmax(q_logits.double(), dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1)


def top1_agreement(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """The share of tokens, 0 to 1, at which both (`[..., vocab]`) would greedily say the same."""
    return (p_logits.argmax(-1) == q_logits.argmax(-1)).double().mean().item()
