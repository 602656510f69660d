"""Select the quantization method of a folder by its name in the config."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import TensorReader

from ....models.config_keys import RecordingConfig, iter_leaves
from ....models.left_out import LeftOut
from . import compressed_tensors as ct
from .bitsandbytes import read_bnb
from .floats import read_fp8, read_mxfp4
from .gptq import read_awq, read_gptq
from .tensor import DequantizedReader, QuantizedTensor
from .torchao import read_torchao

_Method = Callable[[TensorReader, Collection[str], Mapping[str, Any]], dict[str, QuantizedTensor]]
METHODS: Mapping[str, _Method] = {
    "mxfp4": read_mxfp4,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": ct.read_compressed,
    "bitsandbytes": read_bnb,
    "torchao": read_torchao,
}

# Regular expressions for keys that do not change the weights, by the reason.
_MEANINGLESS = {
    "is shown by the tensors": r"quant_type\w* modules_\w+ ignore\w* llm_int8_skip_modules lm_head targets meta fmt "
    r"include_input_output_embeddings untie_embedding_weights zero_point bnb_4bit_quant_type strategy group_size "
    r"sym\w* bnb_4bit_use_double_quant _?load_in_\dbit llm_int8_has_fp16_weight type num_bits dynamic block_structure "
    r"scale_\w+ zp_dtype dequantize quant_method quantization_status desc_act static_groups format version",
    "describes how the codes were chosen": r"damp_\w+ dataset tokenizer batch_size model_seqlen block_name_to_quantize "
    r"module_name_\w+ true_sequential mse cache_block_outputs observer\w* actorder \w*compression_ratio pad_token_id "
    r"model_name_or_path model_file_base_name provider",
    "chooses kernels and their dtypes": r"\w*exllama\w* use_cuda_fp16 max_input_length backend do_fuse "
    r"fuse_max_seq_len pack_dtype bnb_4bit_compute_dtype bnb_4bit_quant_storage llm_int8_enable_fp32_cpu_offload",
}
_UNREAD = re.compile("|".join(" ".join(_MEANINGLESS.values()).split()))


def find_unread_scheme(scheme: RecordingConfig) -> Iterator[LeftOut]:
    """Yield a part for each key of `scheme` (quantization_config) that was not read and may change the weights."""
    for path, value in iter_leaves(dict(scheme), scheme.read):
        if value and path not in scheme.read and not _UNREAD.fullmatch(path.rpartition(".")[2]):
            yield LeftOut("key", f"quantization_config.{path}", f"{value!r:.60}")


def dequantize_reader(reader: TensorReader, config: Mapping[str, Any], source: str) -> TensorReader:
    """Return a reader of the weights in `reader`, dequantized by the method in `config`; `reader` itself without one.

    The result has the names and shapes of an unquantized checkpoint. Errors call the config `source`.

    Raises:
        WeftError: if the method is not supported, or scales are missing or do not fit.
    """
    scheme = config.get("quantization_config")
    if not scheme:
        return reader
    scheme = scheme if isinstance(scheme, Mapping) else {"quant_method": scheme}
    method = scheme.get("quant_method")
    if method is None and (scheme.get("load_in_8bit") or scheme.get("load_in_4bit")):
        method = "bitsandbytes"  # the first configs did not name it
    method = str(method)
    if method not in METHODS:
        raise WeftError(
            f"{source}: quantization by {method} is not supported, only by {', '.join(list(METHODS)[:-1])} or "
            f"{list(METHODS)[-1]}: give weft such a folder, the unquantized one, or a GGUF file"
        )
    keys = dict.fromkeys(reader.keys())
    try:
        quantized = METHODS[method](reader, keys, scheme)
    except WeftError as e:
        raise WeftError(f"{source}: cannot read weights quantized by {method}: {e}") from e
    hidden = ct.find_activation_keys(keys) if method == "compressed-tensors" else frozenset()
    return DequantizedReader(reader, quantized, hidden)
