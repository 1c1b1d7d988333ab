"""Small models of transformers with random weights, made without a network: two layers of experts each."""

import torch
import transformers

VOCABULARY = 96
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
MODELS = {
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=3,
            head_dim=8,
            norm_topk_prob=True,
        ),
    ),
    "mixtral": ("Mixtral", dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            intermediate_size=48,
            moe_intermediate_size=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=0,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            num_nextn_predict_layers=0,
        ),
    ),
    "gpt_oss": (
        "GptOss",
        dict(intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    ),
}


def make_model(name, seed=0):
    """The model in float32 on the CPU, weights large enough for every path to matter."""
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**_COMMON | options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def tokens(batch, length, seed=0):
    """[batch, length] token ids."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
