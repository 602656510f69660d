"""A family: that of Llama, by a name that transformers does not know."""

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.families.llama import LLAMA

FAMILIES.register(LLAMA.but("lama"))
