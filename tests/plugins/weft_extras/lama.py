"""A family: that of Llama, by a name that transformers and llama.cpp do not know."""

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.families.dense.llama import LLAMA
from weft.frontends.models.tables import gguf
from weft.frontends.models.tables.family import Loader

FAMILIES.register(
    LLAMA.derive("lama", transformers="LamaForCausalLM", gguf=gguf.BASE.derive("lama-gguf", loader=Loader()))
)
