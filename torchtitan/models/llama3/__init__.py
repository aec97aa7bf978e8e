"""The Llama 3 family."""

from torchtitan.models.llama3.args import FLAVORS
from torchtitan.models.llama3.model import build_llama3
from torchtitan.models.llama3.plan import init_rules_llama3, plan_llama3
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec("llama3", dict(FLAVORS), build_llama3, plan_llama3, init_rules_llama3)
