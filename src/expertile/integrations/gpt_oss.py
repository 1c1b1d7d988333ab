"""gpt-oss's own checkpoints under transformers: `integrations.checkpoints` by its first names."""

from expertile.integrations.checkpoints import load_experts as load_gpt_oss_experts
from expertile.integrations.checkpoints import load_model as load_gpt_oss

__all__ = ["load_gpt_oss", "load_gpt_oss_experts"]
