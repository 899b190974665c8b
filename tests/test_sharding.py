"""Tests of DTensor operands in two processes: each computes its shard, and the whole equals that of one process."""

import itertools

import pytest
import torch
from launched import Launch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.device_mesh import init_device_mesh

import fastattn
from fastattn.ops.sharding import KEY_STEP

SEED = torch.tensor([5, 6])
OFFSETS = torch.tensor([0, 3, 8])


def mesh_of(processes):
    return init_device_mesh("cpu", (processes,))


def compare(mesh, function, operands, placements, **options):
    """Check that results and gradients of DTensors are those of one process; return the first result.

    ``operands`` and ``placements`` go by position.
    """
    results = []
    for place in (True, False):
        leaves = [tensor.clone() for tensor in operands]
        if place:
            leaves = [distribute_tensor(leaf, mesh, [p]) for leaf, p in zip(leaves, placements, strict=True)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        found = function(*leaves, **options)
        found = found if isinstance(found, tuple) else (found,)
        sum(result.square().sum() for result in found).backward()
        results.append([*found, *(leaf.grad for leaf in leaves)])
    for ours, whole in zip(*results, strict=True):
        assert ours.shape == whole.shape
        torch.testing.assert_close(ours.full_tensor(), whole)
    return results[0][0]


def sharded_calls(mesh):
    """Compare sharded calls. A batch of 3 is uneven on two processes. All shards read the mask, the lengths and the
    parameters."""
    q, k, v = torch.randn(3, 4, 7, 8), torch.randn(3, 4, 9, 8), torch.randn(3, 4, 9, 5)
    lengths, bias = torch.tensor([9, 0, 4]), torch.randn(4, 7, 9)
    for place in (Shard(0), Shard(1), Replicate()):

        def attend(q, k, v, bias):
            return fastattn.scaled_dot_product_attention(
                q, k, v, bias, is_causal=True, key_lengths=lengths, return_lse=True
            )

        beside = {Shard(1): Shard(0)}.get(place, Replicate())  # of the mask, whose first dimension is the heads
        for of_mask in {Replicate(), beside}:
            out = compare(mesh, attend, (q, k, v, bias), (place, place, place, of_mask))
            assert out.placements == (place,)
        grouped = fastattn.scaled_dot_product_attention
        compare(mesh, grouped, (q, k[:, :2], v[:, :2]), (place,) * 3, enable_gqa=True, attn_mask=bias[:1] > 0)
        compare(mesh, fastattn.attention_weights, (q, k), (place,) * 2, key_lengths=lengths)
        compare(mesh, fastattn.softmax_dropout, (bias.expand(3, 4, 7, 9).clone(),), (place,), attn_mask=bias > 0)
        x, weight = torch.randn(3, 4, 6), torch.randn(6)
        compare(mesh, lambda x, w: fastattn.layer_norm(x, (6,), w), (x, weight), (place, Replicate()))
        compare(
            mesh, lambda x, y, w: fastattn.dropout_add_layer_norm(x, y, w, prenorm=True), (x, x + 1, weight),
            (place, place, Replicate()),
        )  # fmt: skip
    q, k = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    packed = {"enable_gqa": True, "return_lse": True, "seqused_k": torch.tensor([3, 2])}
    for place in (Shard(1), Replicate()):
        compare(
            mesh, lambda q, k, v: fastattn.varlen_attn(q, k, v, OFFSETS, OFFSETS, 5, 5, **packed), (q, k, k + 1),
            (place,) * 3,
        )  # fmt: skip


def dropped(mesh):
    """Check that a shard's mask is that of the seed with its key raised by the shard's number, and that replicas have
    one mask. Without a seed the processes' generators draw one seed."""
    rank = mesh.get_rank()
    ones = torch.ones(4, 2, 16, 32)
    for place in (Shard(0), Shard(1), Replicate()):
        out = fastattn.dropout(distribute_tensor(ones, mesh, [place]), 0.5, seed=SEED)
        number = 0 if place == Replicate() else rank
        seed = SEED + torch.tensor([number * KEY_STEP % 2**63, 0])
        assert torch.equal(out.to_local() > 0, fastattn.dropout_mask(out.to_local().shape, 0.5, seed))
        torch.manual_seed(0)
        first, second = (fastattn.dropout(distribute_tensor(ones, mesh, [place]), 0.5) for _ in range(2))
        assert not torch.equal(first.full_tensor(), second.full_tensor())
        shards = first.full_tensor().chunk(mesh.size(), 0 if place == Shard(0) else 1)
        assert place == Replicate() or mesh.size() == 1 or not torch.equal(*shards)
    q = distribute_tensor(torch.randn(4, 2, 5, 8), mesh, [Shard(0)])
    weights = fastattn.attention_weights(q, q, dropout_p=0.5, seed=SEED)
    torch.testing.assert_close(
        fastattn.scaled_dot_product_attention(q, q, q, dropout_p=0.5, seed=SEED).to_local(),
        weights.to_local() @ q.to_local(),
    )


def modules(mesh):
    norm, torchs = fastattn.LayerNorm(6), nn.LayerNorm(6)
    distribute_module(norm, mesh)
    x = torch.randn(4, 3, 6)
    norm(distribute_tensor(x, mesh, [Shard(1)])).square().sum().backward()
    torchs(x).square().sum().backward()
    torch.testing.assert_close(norm.weight.grad.full_tensor(), torchs.weight.grad)


def process():
    distributed.init_process_group("gloo")
    try:
        for part in (sharded_calls, dropped, modules):
            torch.manual_seed(0)
            part(mesh_of(distributed.get_world_size()))
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.torch_version
def test_two_processes():
    launch = Launch(2, 0, process)
    _, err = launch.communicate(timeout=600)
    assert launch.returncode == 0, err


@pytest.fixture
def mesh(tmp_path):
    """Return a mesh of one process, which is enough to refuse a placement."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield mesh_of(1)
    distributed.destroy_process_group()


@pytest.mark.parametrize("part", [sharded_calls, dropped, modules])
def test_one_process(part, mesh):
    part(mesh)


def test_other_placements_are_refused_by_name(mesh):
    x = torch.randn(2, 4, 6, 8)

    def place(*placements, tensor=x):
        return [DTensor.from_local(tensor, mesh, [p], run_check=False) for p in placements]

    attend = fastattn.scaled_dot_product_attention
    for dim, bad in itertools.product((2, 3), ("query", "all")):
        operands = place(*(Shard(dim if bad == "all" or n == 0 else 0) for n in range(3)))
        with pytest.raises(ValueError, match=rf"query must be placed by .*, got .*{dim}.*; redistribute"):
            attend(*operands)
    with pytest.raises(ValueError, match="query must be placed by"):
        attend(*place(Partial(), Partial(), Partial()))
    with pytest.raises(ValueError, match=r"value must be placed by .* as query is"):
        attend(*place(Shard(0), Shard(0), Shard(1)))
    with pytest.raises(TypeError, match="key must be a DTensor as query is, got Tensor"):
        attend(*place(Shard(0)), x, x)
    with pytest.raises(ValueError, match="attn_mask must be replicated or placed by"):
        attend(*place(Shard(0), Shard(0), Shard(0)), *place(Shard(3), tensor=torch.zeros(2, 4, 6, 6)))
    with pytest.raises(TypeError, match="attn_mask requires a gradient, so it must be a DTensor"):
        attend(*place(Shard(0), Shard(0), Shard(0)), torch.zeros(6, 6, requires_grad=True))
    with pytest.raises(ValueError, match="key_lengths beside DTensors need"):
        attend(*place(*(Shard(0),) * 3, tensor=x[None]), key_lengths=torch.tensor([6, 6]))
    with pytest.raises(ValueError, match="same batch dimensions"):
        attend(*place(Shard(0)), *place(Shard(0), Shard(0), tensor=x[:1]))
    with pytest.raises(ValueError, match="input must be placed by"):
        fastattn.layer_norm(*place(Shard(3)), (8,))
    with pytest.raises(ValueError, match="weight must be replicated"):
        fastattn.layer_norm(*place(Shard(0)), (8,), *place(Shard(0), tensor=torch.ones(8)))
    with pytest.raises(ValueError, match="input must be placed by"):
        fastattn.softmax_dropout(*place(Shard(2)))
    with pytest.raises(ValueError, match="query must be placed by"):
        fastattn.varlen_attn(*place(*(Shard(0),) * 3, tensor=x[0].mT.mT[:, :, :4]), OFFSETS, OFFSETS, 5, 5)
    with pytest.raises(ValueError, match="input must be placed by"):
        fastattn.dropout(*place(Partial()))
