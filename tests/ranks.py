"""What two processes run for tests/test_distributed.py: each case compares itself with one process on the whole."""

import copy
import json
import os
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import explicit_dropout as xd

SCORES = {"query": 0.5, "key": 0.3, "query_key": 0.2, "attended_value": 0.7}
LINEAR = {"value": 0.8, "feed_forward": 0.4}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class SelfAttention(nn.Module):
    def __init__(self, width, heads, *, fused=False):
        super().__init__()
        self.num_heads, self.fused = heads, fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (torch.unflatten(part, -1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width, heads, *, fused):
        super().__init__()
        self.attention = SelfAttention(width, heads, fused=fused)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


@xd.register_rule(SelfAttention)
def self_attention(module):
    if module.fused:
        width = module.qkv.in_features
        parts = [xd.Projection(module.qkv, slice(i * width, (i + 1) * width)) for i in range(3)]
    else:
        parts = [xd.Projection(layer) for layer in (module.q_proj, module.k_proj, module.v_proj)]
    return xd.Attention(module, *parts, output=module.out_proj, heads=module.num_heads, weights="compute")


class Model(nn.Module):
    def __init__(self, *, fused=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(8, 2, fused=fused) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(3))


def whole(model, noise, strengths):
    """Gradients and terms of one process on the whole batch."""
    model = copy.deepcopy(model)
    reg = xd.ExplicitDropout(model, noise, **strengths)
    (model(BATCH).square().mean() + reg()).backward()
    return {name: p.grad for name, p in model.named_parameters()}, reg.terms()


def mine(rank):
    return BATCH.chunk(2)[rank]


def compare(model, terms, expected):
    gradients, wanted = expected
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        name = name.removeprefix("module.")
        assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    for name, term in terms.items():
        mean = term.clone()
        dist.all_reduce(mean)
        assert_close(mean / 2, wanted[name.removeprefix("module.")], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------- twins of dropout


class Dropping(Model):
    """The same with dice: modules, a function, and those of fused attention."""

    def __init__(self):
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.1), nn.TransformerEncoderLayer(8, 2, 12, 0.2, batch_first=True)

    def forward(self, x):
        for block in self.blocks:
            x = nn.functional.dropout(block(self.dropout(x)), 0.3, self.training)
        return self.head(self.layer(x))


@case
def twins_under_ddp(rank):
    model = Dropping()
    alone = copy.deepcopy(model)
    twins = xd.convert_dropout(alone, 0.5)
    (alone(BATCH).square().mean() + twins()).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}, twins.terms()
    for first in (True, False):
        own = copy.deepcopy(model)
        if first:
            twins = xd.convert_dropout(own, 0.5)
            own = DistributedDataParallel(own)
        else:
            own = DistributedDataParallel(own)
            twins = xd.convert_dropout(own, 0.5)
        (own(mine(rank)).square().mean() + twins()).backward()
        compare(own, {name.replace("module:", "(model):"): term for name, term in twins.terms().items()}, expected)


@case
def twins_refuse_weights_that_are_taken_away(rank):
    model = Dropping()
    for block in model.blocks:
        fully_shard(block)
    twins = xd.convert_dropout(fully_shard(model), 0.5)
    with pytest.raises(xd.UnsupportedSiteError, match="FSDP2"):
        model(mine(rank))
    twins.remove()


# ---------------------------------------------------------------------------------------------- DDP


def data_parallel(rank, *, attach_first, noise, **settings):
    model = Model()
    expected = whole(model, noise, {**LINEAR, **SCORES})
    strengths = {**LINEAR, **SCORES}
    if attach_first:
        reg = xd.ExplicitDropout(model, noise, **strengths)
        model = DistributedDataParallel(model, **settings)
    else:
        model = DistributedDataParallel(model, **settings)
        reg = xd.ExplicitDropout(model, noise, **strengths)
    for _ in range(2):
        model.zero_grad()
        (model(mine(rank)).square().mean() + reg()).backward()
        compare(model, reg.terms(), expected)


@case
def ddp_attached_before_wrapping(rank):
    data_parallel(rank, attach_first=True, noise=xd.bernoulli(0.2))


@case
def ddp_attached_after_wrapping(rank):
    data_parallel(rank, attach_first=False, noise=xd.inverted(0.2))


@case
def ddp_looking_for_unused_parameters(rank):
    data_parallel(rank, attach_first=True, noise=xd.inverted(0.2), find_unused_parameters=True)


@case
def ddp_followed_to_the_loss(rank):
    noise, strengths = xd.inverted(0.2), {"query": 0.5, **LINEAR}
    alone = Model()
    reg = xd.LossLevelDropout(alone, noise, **strengths)
    outputs = alone(BATCH).mean(1)
    (outputs.square().mean() + reg(outputs)).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}, reg.terms()
    for settings in ({}, {"find_unused_parameters": True}):
        model = Model()
        reg = xd.LossLevelDropout(model, noise, **strengths)
        model = DistributedDataParallel(model, **settings)
        for _ in range(3):
            model.zero_grad()
            outputs = model(mine(rank)).mean(1)
            (outputs.square().mean() + reg(outputs)).backward()
            compare(model, reg.terms(), expected)
    model = Model()
    reg = xd.LossLevelDropout(model, noise, **strengths)
    model = DistributedDataParallel(model, static_graph=True)
    outputs = model(mine(rank)).mean(1)
    with pytest.raises(xd.UnsupportedSiteError, match="static_graph"):
        reg(outputs)


# ---------------------------------------------------------------------------------------------- FSDP2


@case
def fsdp_refuses_to_follow_to_the_loss(rank):
    with pytest.raises(xd.UnsupportedSiteError, match="fully_shard"):
        xd.LossLevelDropout(sharded(Model(), True), xd.inverted(0.2), value=1.0)
    model = Model()
    reg = xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0)
    outputs = sharded(model, False)(mine(rank)).mean(1)
    with pytest.raises(xd.UnsupportedSiteError, match="fully_shard"):
        reg(outputs)


def sharded(model, reshard):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def fully_sharded(rank, noise, strengths, *, fused=False, attach_first=False):
    for reshard in (True, False):
        model = Model(fused=fused)
        expected = whole(model, noise, strengths)
        if attach_first:
            reg = xd.ExplicitDropout(model, noise, **strengths)
            sharded(model, reshard)
        else:
            reg = xd.ExplicitDropout(sharded(model, reshard), noise, **strengths)
        for _ in range(2):
            model.zero_grad()
            (model(mine(rank)).square().mean() + reg()).backward()
            compare(model, reg.terms(), expected)


@case
def fsdp_inverted(rank):
    fully_sharded(rank, xd.inverted(0.2), LINEAR)


@case
def fsdp_bernoulli(rank):
    fully_sharded(rank, xd.bernoulli(0.2), LINEAR)


@case
def fsdp_attached_before_sharding(rank):
    fully_sharded(rank, xd.bernoulli(0.2), LINEAR, attach_first=True)


@case
def fsdp_fused_projections(rank):
    fully_sharded(rank, xd.bernoulli(0.2), LINEAR, fused=True)


@case
def fsdp_coherent_scores_and_attended_values(rank):
    fully_sharded(rank, xd.paper(0.2), {**LINEAR, **SCORES})


@case
def fsdp_several_forward_passes(rank):
    noise = xd.bernoulli(0.2)
    model = Model()
    expected = whole(model, noise, LINEAR)
    reg = xd.ExplicitDropout(sharded(model, True), noise, **LINEAR)
    loss = sum(model(part).square().mean() / 2 for part in mine(rank).chunk(2))
    (loss + reg()).backward()
    compare(model, reg.terms(), expected)


@case
def fsdp_unequal_shares_have_the_gradients_of_ddp(rank):
    noise, share = xd.inverted(0.2), torch.randn(2, (6, 2)[rank], 8, generator=torch.Generator().manual_seed(rank))

    def gradients(model, reg):
        (model(share).square().mean() + reg()).backward()
        grads = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
        return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}

    model, other = Model(), Model()
    reg = xd.ExplicitDropout(model, noise, **LINEAR)
    expected = gradients(DistributedDataParallel(model), reg)
    reg = xd.ExplicitDropout(sharded(other, True), noise, **LINEAR)
    for name, gradient in gradients(other, reg).items():
        assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@case
def fsdp_accumulated_without_reduction(rank):
    noise = xd.bernoulli(0.2)
    model = Model()
    expected = whole(model, noise, LINEAR)
    reg = xd.ExplicitDropout(sharded(model, True), noise, **LINEAR)
    for number, part in enumerate(mine(rank).chunk(2)):
        model.set_requires_gradient_sync(number == 1)
        ((model(part).square().mean() + reg()) / 2).backward()
    compare(model, {}, expected)


@case
def fsdp_every_layer_a_unit_of_its_own(rank):
    noise, mesh = xd.bernoulli(0.2), dist.device_mesh.init_device_mesh("cpu", (2,))
    for attach_first in (True, False):
        model = Model()
        expected = whole(model, noise, LINEAR)
        if attach_first:
            reg = xd.ExplicitDropout(model, noise, **LINEAR)
        for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if not attach_first:
            reg = xd.ExplicitDropout(model, noise, **LINEAR)
        (model(mine(rank)).square().mean() + reg()).backward()
        compare(model, reg.terms(), expected)


@case
def fsdp_refuses_scores_where_every_layer_is_a_unit_of_its_own(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for component in ("query", "key", "attended_value"):
        model = Model()
        for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
            fully_shard(layer, mesh=mesh)
        xd.ExplicitDropout(fully_shard(model, mesh=mesh), xd.paper(0.2), **{component: 1.0})
        try:
            model(mine(rank))
        except xd.UnsupportedSiteError as error:
            said = f"blocks.0.attention:{component}: its projections are sharded one by one"
            assert said in str(error)  # noqa: PT017
        else:
            raise AssertionError("it was not refused")


@case
def fsdp_refuses_what_keeps_a_weight(_):
    for component in SCORES:
        try:
            xd.ExplicitDropout(sharded(Model(), True), xd.inverted(0.2), **{component: 1.0})
        except xd.UnsupportedSiteError as error:
            assert "fully_shard" in str(error), error  # noqa: PT017
            assert f"blocks.0.attention:{component}" in str(error), error  # noqa: PT017
        else:
            raise AssertionError(f"{component} was not refused")


@case
def fsdp_refuses_it_also_when_sharded_later(rank):
    for reshard in (True, False):
        model = Model()
        reg = xd.ExplicitDropout(model, xd.bernoulli(0.2), query=1.0)
        sharded(model, reshard)
        model(mine(rank))
        try:
            reg()
        except xd.UnsupportedSiteError as error:
            assert "fully_shard" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("it was not refused")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@case
def fsdp_multihead_attention_is_exact_without_mean_and_refused_with_one(rank):
    noise, model = xd.inverted(0.2), Encoder()
    expected = whole(model, noise, LINEAR)
    reg = xd.ExplicitDropout(sharded(model, True), noise, **LINEAR)
    (model(mine(rank)).square().mean() + reg()).backward()
    compare(model, reg.terms(), expected)
    reg.remove()
    try:
        xd.ExplicitDropout(model, xd.bernoulli(0.2), value=1.0)
    except xd.UnsupportedSiteError as error:
        assert "fully_shard" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("it was not refused")


def work(rank, folder):
    """Run every case and write down how it went."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    outcome = {}
    for name, run in CASES.items():
        try:
            run(rank)
        except Exception:
            outcome[name] = traceback.format_exc()
        else:
            outcome[name] = "exact"
        Path(folder, f"{rank}.json").write_text(json.dumps(outcome))
        failed = torch.tensor(float(outcome[name] != "exact"))
        dist.all_reduce(failed)
    dist.destroy_process_group()
    os._exit(0)  # all is written down, and torch sometimes aborts while its threads end
