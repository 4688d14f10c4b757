"""Every RL recipe's loss in torch, float64 and plain loops, written from its equations for the tests.

Shares no code with the package. A case is a dict of tensors:
  logp, old, sampled, ref, masked, entropy [P, G, T]; rewards [P, G, C]; masks [P, G, C, T];
  valid [P, G]; lengths [P, G]
"""

import math

import torch

from tests.rl import torch_reference as reference

CHANNELS = ("perception", "derivation", "format", "overlong")


def tokens(case):
    """[P, G, T] 0/1: the tokens of responses that exist."""
    t = torch.arange(case["logp"].shape[-1])
    return ((t < case["lengths"][..., None]) & case["valid"].bool()[..., None]).double()


def group_advantages(case, paid, *, scale=True, leave_one_out=False):
    """[P, G]: the paid channels summed and compared within the group."""
    total = case["rewards"][:, :, [CHANNELS.index(name) for name in paid]].sum(-1)
    out = torch.zeros_like(total)
    for p in range(len(total)):
        members = [g for g in range(total.shape[1]) if case["valid"][p, g]]
        values = total[p, members]
        if leave_one_out:
            others = (values.sum() - values) / (len(values) - 1)
            out[p, members] = values - others
        elif values.max() > values.min():
            deviation = values - values.mean()
            out[p, members] = reference.normalise(values) if scale else deviation
    return out


def surrogate(case, adv, *, low=0.2, high=0.28, ratio="token", dual=None):
    """[P, G, T] clipped losses for advantages [P, G, T]."""
    mask = tokens(case)
    d = (case["logp"] - case["old"]) * mask
    if ratio != "token":
        mean = d.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        d = mean.expand(d.shape) if ratio == "sequence" else mean.detach() + d - d.detach()
    r, bounded = d.exp(), d.clamp(math.log(1 - low), math.log(1 + high)).exp()
    return torch.maximum(-adv * r, -adv * bounded) * mask


def average(values, mask, kind):
    """A batch's mean of token values [P, G, T] in the four ways."""
    prompts, group, length = values.shape
    if kind == "token_batch":
        return (values * mask).sum() / mask.sum()
    if kind == "constant":
        return (values * mask).sum() / ((mask.sum(-1) > 0).sum() * length)
    means = []
    for p in range(prompts):
        if kind == "token_group":
            if mask[p].sum():
                means.append((values[p] * mask[p]).sum() / mask[p].sum())
            continue
        for g in range(group):
            if mask[p, g].sum():
                means.append((values[p, g] * mask[p, g]).sum() / mask[p, g].sum())
    return sum(means) / len(means)


def loss(case, recipe):
    """The loss of a recipe by name."""
    mask = tokens(case)
    three, four = CHANNELS[:3], CHANNELS

    def whole(adv):
        return adv[..., None].expand(mask.shape)

    grpo = whole(group_advantages(case, three))
    match recipe:
        case "grpo":
            kl = average(reference.kl(case["logp"], case["ref"], "low_var_kl"), mask, "sequence")
            return average(surrogate(case, grpo, high=0.2), mask, "sequence") + 0.001 * kl
        case "rloo":
            kl = average(reference.kl(case["logp"], case["ref"], "low_var_kl"), mask, "sequence")
            adv = whole(group_advantages(case, three, leave_one_out=True))
            return average(surrogate(case, adv, high=0.2), mask, "sequence") + 0.001 * kl
        case "dapo":
            adv = whole(group_advantages(case, four))
            return average(surrogate(case, adv), mask, "token_batch")
        case "dr_grpo":
            adv = whole(group_advantages(case, three, scale=False))
            return average(surrogate(case, adv, high=0.2), mask, "constant")
        case "gspo":
            terms = surrogate(case, grpo, low=3e-4, high=4e-4, ratio="sequence")
            return average(terms, mask, "sequence")
        case "paper" | "strict":
            masks = case["masks"] * mask[:, :, None]
            adv = reference.token_advantages(
                case["rewards"][..., :3], masks[:, :, :3], case["valid"].bool(), "scope"
            )
            return average(surrogate(case, adv), mask, "token_batch")
        case "papo":
            adv = whole(group_advantages(case, four))
            leans = reference.kl(case["logp"], case["masked"], "low_var_kl")
            plain = average(surrogate(case, adv), mask, "token_batch")
            return (
                plain
                - 0.01 * average(leans, mask, "token_batch")
                + 0.03 * average(-case["logp"], mask, "token_batch")
                + 0.03 * average(-case["masked"], mask, "token_batch")
            )
        case "vppo":
            adv, keep = vppo(case, group_advantages(case, four))
            plain = average(surrogate(case, adv), keep, "token_batch")
            return plain + 0.06 * average(case["entropy"], mask, "token_batch")
    raise ValueError(recipe)


def vppo(case, adv):
    """(advantages [P, G, T], kept tokens [P, G, T]) of VPPO: top 40 %, factors from 0.9."""
    mask = tokens(case)
    v = reference.kl(case["old"], case["masked"].detach(), "low_var_kl")
    keep = torch.zeros_like(mask)
    mean = {}
    for p, g in [(p, g) for p in range(len(mask)) for g in range(mask.shape[1])]:
        n = int(mask[p, g].sum())
        if n:
            best = sorted(range(n), key=lambda t: -float(v[p, g, t]))[: math.ceil(0.4 * n - 1e-9)]
            keep[p, g, best] = 1
            mean[p, g] = float(v[p, g, :n].mean())
    low, high = min(mean.values()), max(mean.values())
    u = {at: (value - low) / (high - low) for at, value in mean.items()}
    top = 0.9 + 0.1 / (sum(u.values()) / len(u))
    out = torch.zeros_like(mask)
    for (p, g), value in u.items():
        out[p, g] = adv[p, g] * (0.9 + value * (top - 0.9))
    return out * keep, keep
