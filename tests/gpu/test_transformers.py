"""transformers' models on a GPU with experts_implementation="expertile" against "eager"."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from expertile.integrations import transformers as integration
from tests.integrations.test_transformers import (
    FORMS,
    assert_close,
    assert_same,
    experts_of,
    make_experts,
    make_fp8_experts,
    routed,
    run,
    values_and_gradients,
)
from tests.support.transformers_models import MODELS, make_model, tokens


@pytest.fixture(autouse=True, scope="module")
def registered():
    integration.register()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_against_eager(name):
    model, ids = make_model(name).cuda(), tokens(2, 24).cuda()
    logits, grads = run(model, "eager", ids)
    found, found_grads = run(model, "expertile", ids)
    assert_close(found, logits, 1e-4)
    assert_same(found_grads, grads, 1e-3)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    model.eval()
    generated = []
    for implementation in ("eager", "expertile"):
        model.set_experts_implementation(implementation)
        generated.append(model.generate(ids[:, :8], **options))
    assert torch.equal(*generated)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_in_bfloat16(name):
    experts = experts_of(make_model(name)).cuda().bfloat16()
    hidden, count = experts.down_proj.shape[2 if experts.is_transposed else 1], experts.down_proj.shape[0]
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(300, hidden, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ids = torch.rand(300, count, generator=g, device="cuda").topk(2, 1).indices
    weights = torch.rand(300, 2, generator=g, device="cuda").requires_grad_()
    found = values_and_gradients(experts, "expertile", (x, ids, weights))
    expected = values_and_gradients(experts, "eager", (x, ids, weights))
    assert_same(found, expected, 2e-2)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
def test_experts_with_a_gate_of_their_own(form):
    experts = make_experts(**form).cuda()
    inputs = [t.detach().cuda().requires_grad_(t.is_floating_point()) for t in routed(50)]
    found = values_and_gradients(experts, "expertile", inputs)
    assert_same(found, values_and_gradients(experts, "eager", inputs), 1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "own"])
@torch.no_grad()
def test_in_a_graph(name):
    experts = (make_experts(biased=True) if name == "own" else experts_of(make_model(name))).cuda()
    experts.config._experts_implementation = "expertile"
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x, ids = torch.randn(4, hidden, device="cuda"), torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    weights = torch.rand(4, 2, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        experts(x, ids, weights)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, ids, weights)
    ids.copy_(torch.tensor([[0, 1], [3, 2], [1, 2], [2, 0]]))
    graph.replay()
    experts.config._experts_implementation = "eager"
    assert_close(out, experts(x, ids, weights), 1e-4)


def test_fp8_experts():
    experts, _ = make_fp8_experts()
    x, ids = torch.randn(64, 128).bfloat16(), torch.rand(64, 4).topk(2, 1).indices
    weights = torch.full((64, 2), 0.5)
    with torch.no_grad():
        expected = experts(x, ids, weights)
        assert_close(experts.cuda()(x.cuda(), ids.cuda(), weights.cuda()).cpu(), expected, 2e-2)
