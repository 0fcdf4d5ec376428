"""Configs of published encoders, and the numbers of parameters that decide their vectors: without pooler and heads.

Source: the config.json that each model's authors published, as in the copy that a comment names. Left out, for no copy
in full was found: BERT-large, BGE-base and -large, E5, XLM-RoBERTa-base.
"""

_BERT = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
# Keys of BERT's older configs.
_POOLER = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}
_LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_XLM_ROBERTA_LARGE = _BERT | {
    "architectures": ["XLMRobertaForMaskedLM"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514,
    "model_type": "xlm-roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
_MODERNBERT = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-5,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "vocab_size": 50368,
}
PUBLISHED_ENCODERS = {
    # kujaarora/MLBA_CRM on GitHub, bert-base-uncased/config.json
    "BERT-base-uncased": (_BERT, 108_891_648),
    # sdpython/onnx-diagnostic on GitHub, hub_data_cached_configs.py; all-MiniLM-L6-v1 there as well
    "BERT-base-multilingual-cased": (
        _BERT | _POOLER | {"architectures": ["BertForMaskedLM"], "vocab_size": 119547},
        177_262_848,
    ),
    "all-MiniLM-L6": (_BERT | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}, 22_565_376),
    # silence-breaker/SFT-MoE on GitHub, models/bge-small-en-v1.5/config.json
    "BGE-small-en-v1.5": (_BERT | _LABELS | {"hidden_size": 384, "intermediate_size": 1536}, 33_212_160),
    # quoted in ModelScope's guide to models of other libraries
    "XLM-RoBERTa-large": (_XLM_ROBERTA_LARGE, 558_840_832),
    # vminh16/VI-Legal-RAG on GitHub, models/bge-m3/config.json
    "BGE-M3": (
        _XLM_ROBERTA_LARGE
        | {
            "add_cross_attention": False,
            "architectures": ["XLMRobertaModel"],
            "is_decoder": False,
            "max_position_embeddings": 8194,
            "tie_word_embeddings": True,
        },
        566_705_152,
    ),
    # the defaults of transformers' ModernBertConfig; sizes of Warner et al. 2024, appendix: 149 and 395 million
    "ModernBERT-base": (_MODERNBERT, 149_014_272),
    "ModernBERT-large": (
        _MODERNBERT
        | {"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16, "num_hidden_layers": 28},
        394_781_696,
    ),
    # sizes of Vera et al. 2025; with its two Dense layers, 4,718,592, the 308 million that are published
    "EmbeddingGemma-300m": (
        {
            "architectures": ["Gemma3TextModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 768,
            "intermediate_size": 1152,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
            "max_position_embeddings": 2048,
            "model_type": "gemma3_text",
            "num_attention_heads": 3,
            "num_hidden_layers": 24,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "use_bidirectional_attention": True,
            "vocab_size": 262144,
        },
        302_863_104,
    ),
}
