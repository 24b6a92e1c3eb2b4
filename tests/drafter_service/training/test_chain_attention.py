"""The chains' attention against a loop in float64 over every slot that a slot sees."""

from __future__ import annotations

import pytest
import torch

from drafter_service.training.chain_attention import chain_attention

SHAPE = (2, 3, 9, 8)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def longhand(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Return what each slot sees, slot by slot, in float64."""
    rows, heads, chains, width = q.shape
    out = []
    for i in range(chains):
        seen_k = torch.cat([keys[0][:, :, : i + 1]] + [k[:, :, i : i + 1] for k in keys[1:]], 2)
        seen_v = torch.cat([values[0][:, :, : i + 1]] + [v[:, :, i : i + 1] for v in values[1:]], 2)
        scores = (q[:, :, i, None] * seen_k).sum(-1) / width**0.5
        out.append((scores.softmax(-1)[..., None] * seen_v).sum(2))
    assert len(out) == chains, (rows, heads)
    return torch.stack(out, 2)


def draw(depths: int, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    """Return q, `depths` keys, `depths` values and a gradient, float64."""
    generator = torch.Generator().manual_seed(depths)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2 * depths + 2)
    ]


def with_gradients(run, drawn: list[torch.Tensor], depths: int) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Return the output and the gradients of q, the keys and the values."""
    q, *rest = (tensor.clone().requires_grad_() for tensor in drawn[:-1])
    out = run(q, rest[:depths], rest[depths:])
    return [out.detach(), *torch.autograd.grad(out, [q, *rest], drawn[-1].to(out))]


@pytest.mark.parametrize("depths", [1, 2, 4, 7])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_outputs_and_gradients_are_the_longhand_ones(
    depths: int, dtype: torch.dtype, bound: float
) -> None:
    drawn = draw(depths)
    expected = with_gradients(longhand, drawn, depths)
    found = with_gradients(chain_attention, [t.to(dtype) for t in drawn], depths)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).norm() / theirs.norm()) <= bound


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("depths", [1, 2, 4])
def test_on_cuda_bf16_outputs_and_gradients_are_near_the_longhand_ones(depths: int) -> None:
    drawn = [t.to(torch.bfloat16).double() for t in draw(depths, (2, 3, 130, 64))]
    expected = with_gradients(longhand, drawn, depths)
    halved = [t.to("cuda", torch.bfloat16) for t in drawn]
    found = with_gradients(chain_attention, halved, depths)
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.cpu().double() - theirs).norm() / theirs.norm()
        assert float(error) <= 1e-2


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_captured_graph_gives_the_eager_gradients() -> None:
    drawn = [t.to("cuda", torch.bfloat16) for t in draw(3, (2, 3, 130, 64))]
    expected = with_gradients(chain_attention, drawn, 3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with_gradients(chain_attention, drawn, 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(chain_attention, drawn, 3)
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) <= 1e-2
