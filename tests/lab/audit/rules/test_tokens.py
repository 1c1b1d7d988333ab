import pytest

from expertile.lab.audit import IMPOSSIBLE, INCONSISTENT, NOT_CHECKABLE, POSSIBLE
from tests.lab.audit.helpers import against, the


@pytest.mark.parametrize(("figure", "verdict"), [("65,536", POSSIBLE), ("128", POSSIBLE), ("90,000", INCONSISTENT)])
def test_tokens_over_time(figure, verdict):
    text = (
        f"# Prefill\n\n- Batch size: 32\n- Sequence length: 512\n- Latency: 250 ms\n- Throughput: {figure} tokens/s\n"
    )
    assert the(text, "tokens_over_time").verdict == verdict


def test_which_tokens_are_counted_may_not_be_stated():
    text = (
        "# Serving\n\n- Batch size: 32\n- Sequence length: 512\n- Output length: 100\n- Latency: 250 ms\n- "
        "Throughput: 9000 tokens/s\n"
    )
    assert the(text, "tokens_over_time").verdict == NOT_CHECKABLE


TABLE = (
    "# llama.cpp on RTX 3090\n\n| model | size | backend | test | t/s |\n|-|-|-|-|-|\n| {} | 12.88 GiB | CUDA | {} | "
    "{} ± 0.5 |\n"
)


@pytest.mark.parametrize(("speed", "verdict"), [("61.2", POSSIBLE), ("231.2", IMPOSSIBLE)])
def test_each_token_reads_the_weights_once(speed, verdict):
    assert the(TABLE.format("13B Q8_0", "tg128", speed), "weights_per_token").verdict == verdict


@pytest.mark.parametrize(("model", "test"), [("13B Q8_0", "pp512"), ("8x7B Q4", "tg128"), ("30B-A3B Q4", "tg128")])
def test_prompts_and_mixtures_do_not(model, test):
    assert against(TABLE.format(model, test, "900.0")) == []
