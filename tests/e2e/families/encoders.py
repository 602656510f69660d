"""Encoders."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON, GQA, LOCAL_GLOBAL, MHA, UNTIED, VOCAB, WINDOW

DISTIL = {
    "vocab_size": VOCAB,
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 80,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
XLNET = {"vocab_size": VOCAB, "d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 80, "pad_token_id": 0}
XLM = {"vocab_size": VOCAB, "emb_dim": 64, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64} | {
    "pad_token_id": 0
}
SPARSE = {"block_size": 2, "num_random_blocks": 3}  # texts of up to 22 tokens see all of themselves
DISENTANGLED = {"relative_attention": True, "pos_att_type": "p2c|c2p"}

ROWS = {
    "bert": Row("BertModel", COMMON | {"type_vocab_size": 2, "hidden_act": "gelu"}),
    "roberta": Row("RobertaModel", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": Row("XLMRobertaModel", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}),
    "albert": Row("AlbertModel", COMMON | {"type_vocab_size": 2, "embedding_size": 24}),
    "albert-groups": Row(
        "AlbertModel",
        COMMON | {"type_vocab_size": 2, "embedding_size": 64, "num_hidden_layers": 4, "num_hidden_groups": 2},
    ),
    "electra": Row("ElectraModel", COMMON | {"embedding_size": 24}),
    "xlm-roberta-xl": Row("XLMRobertaXLModel", COMMON | {"pad_token_id": 1}),
    "mpnet": Row("MPNetModel", COMMON | {"pad_token_id": 1}),
    "eurobert": Row("EuroBertModel", COMMON | GQA),
    "modernbert": Row("ModernBertModel", COMMON | {"num_hidden_layers": 4, "local_attention": WINDOW}),
    "modernbert-biases": Row(
        "ModernBertModel",
        COMMON
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu"}
        | {"local_attention": WINDOW, "layer_types": LOCAL_GLOBAL},
    ),
    "nomic_bert": Row("NomicBertModel", COMMON),
    "longformer": Row("LongformerModel", COMMON | {"pad_token_id": 1, "attention_window": [WINDOW, 4, WINDOW]}),
    "big_bird": Row("BigBirdModel", COMMON | SPARSE | {"rescale_embeddings": True, "use_bias": False}),
    "esm": Row(
        "EsmModel",
        COMMON | {"pad_token_id": 1, "mask_token_id": 91, "token_dropout": True, "position_embedding_type": "rotary"},
    ),
    "convbert": Row("ConvBertModel", COMMON | {"embedding_size": 24}),
    "xlnet": Row("XLNetModel", XLNET),
    "fnet": Row("FNetModel", COMMON),
    "nystromformer": Row("NystromformerModel", COMMON | {"conv_kernel_size": 5}),
    "deberta-v2": Row("DebertaV2Model", COMMON | DISENTANGLED | {"position_buckets": 8, "norm_rel_ebd": "layer_norm"}),
    "deberta-v2-shared": Row(
        "DebertaV2Model",
        COMMON | DISENTANGLED | {"position_buckets": 8, "share_att_key": True, "position_biased_input": False},
    ),
    "deberta": Row("DebertaModel", COMMON | DISENTANGLED | {"max_relative_positions": 12, "type_vocab_size": 2}),
}
ALIKE = {
    "xlnet-clamped": Row("XLNetModel", XLNET | {"clamp_len": 5, "ff_activation": "relu"}),
    "convbert-groups": Row(
        "ConvBertModel",
        COMMON | {"embedding_size": 64, "num_groups": 2, "head_ratio": 8, "conv_kernel_size": 5, "hidden_act": "relu"},
    ),
    "modernbert-decoder": Row("ModernBertDecoderForCausalLM", COMMON | {"local_attention": 2 * WINDOW}),
    "modernbert-decoder-biases": Row(
        "ModernBertDecoderForCausalLM",
        COMMON
        | UNTIED
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu"}
        | {"local_attention": 2 * WINDOW, "layer_types": LOCAL_GLOBAL}
        | {"decoder_bias": False, "classifier_bias": True, "classifier_activation": "silu"},
    ),
    "data2vec-text": Row("Data2VecTextModel", COMMON | {"pad_token_id": 1}),
    "jina_embeddings_v3": Row("JinaEmbeddingsV3Model", COMMON | {"pad_token_id": 1}),
    "gte": Row("GteModel", COMMON | {"pad_token_id": 1}),
    "gte-without-types": Row("GteModel", COMMON | {"pad_token_id": 1, "type_vocab_size": 0}),
    "esm-absolute": Row("EsmModel", COMMON | {"pad_token_id": 1, "mask_token_id": 91, "emb_layer_norm_before": True}),
    "deberta-v2-linear": Row("DebertaV2Model", COMMON | DISENTANGLED | {"pos_att_type": "c2p", "type_vocab_size": 2}),
    "deberta-v2-convolved": Row(
        "DebertaV2Model", COMMON | DISENTANGLED | {"conv_kernel_size": 3, "conv_groups": 2, "conv_act": "gelu"}
    ),
    "deberta-p2c": Row("DebertaModel", COMMON | DISENTANGLED | {"pos_att_type": ["p2c"]}),
    "big_bird-rest": Row("BigBirdModel", COMMON | {"block_size": 3, "num_random_blocks": 1}),
    "big_bird-dense": Row("BigBirdModel", COMMON),
    "big_bird-full": Row("BigBirdModel", COMMON | {"attention_type": "original_full", "hidden_act": "relu"}),
    "nystromformer-relu": Row(
        "NystromformerModel", COMMON | {"num_landmarks": 8, "segment_means_seq_len": 8, "hidden_act": "relu"}
    ),
    "roformer": Row("RoFormerModel", COMMON | {"embedding_size": 24}, fixed=("embed_positions.weight",)),
    "roformer-equal": Row("RoFormerModel", COMMON | {"hidden_act": "relu"}, fixed=("embed_positions.weight",)),
    "xlm": Row("XLMModel", XLM),
    "xlm-relu": Row("XLMModel", XLM | {"gelu_activation": False}),
    "flaubert": Row("FlaubertModel", XLM),
    "xmod": Row("XmodModel", COMMON | {"pad_token_id": 1, "default_language": "en_XX"}),
    "xmod-pre": Row("XmodModel", COMMON | {"pad_token_id": 1, "default_language": "en_XX", "pre_norm": True}),
    "xmod-norms": Row(
        "XmodModel",
        COMMON
        | {"pad_token_id": 1, "default_language": "en_XX", "adapter_layer_norm": True, "adapter_reduction_factor": 4},
    ),
    "xmod-pre-norms": Row(
        "XmodModel",
        COMMON | {"pad_token_id": 1, "default_language": "en_XX", "adapter_layer_norm": True, "pre_norm": True},
    ),
    "squeezebert": Row("SqueezeBertModel", COMMON | {"embedding_size": 64}),
    "squeezebert-whole": Row(
        "SqueezeBertModel",
        COMMON | {"embedding_size": 64, "q_groups": 1, "output_groups": 2, "post_attention_groups": 2},
    ),
    "camembert": Row("CamembertModel", COMMON | {"pad_token_id": 1}),
    "distilbert": Row("DistilBertModel", DISTIL),
    "distilbert-relu": Row("DistilBertModel", DISTIL | {"activation": "relu", "sinusoidal_pos_embds": True}),
    "electra-equal": Row("ElectraModel", COMMON | {"embedding_size": 64}),
    "rembert": Row("RemBertModel", COMMON | {"input_embedding_size": 24, "output_embedding_size": 40}),
    "bert-generation": Row("BertGenerationEncoder", COMMON),
    "ernie": Row("ErnieModel", COMMON | {"use_task_id": True}),
    "ernie-without-tasks": Row("ErnieModel", COMMON),
    "megatron-bert": Row("MegatronBertModel", COMMON),
    "roberta-prelayernorm": Row("RobertaPreLayerNormModel", COMMON | {"pad_token_id": 1}),
    "eurobert-biases": Row("EuroBertModel", COMMON | MHA | {"attention_bias": True, "mlp_bias": True}),
}
