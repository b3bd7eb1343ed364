"""Architectures from `transformers` in their smallest form: random weights, two layers, width 32.

Dropout and the like stay at each model's default, so equal losses mean equal random draws.
`transformers` is imported when a model is built: collecting the tests stays quick.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Batch, Entry, Loss, Phase, own_loss

VOCABULARY = 64
IGNORED = -100
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}

WIDTH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DECODER = WIDTH | SPECIAL
GROUPED = DECODER | {"num_key_value_heads": 2}
PATCHES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
PAIRED = SPECIAL | {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}


def _words(generator: torch.Generator, rows: int = 2, columns: int = 12) -> Tensor:
    """Ordinary token ids: 0 to 3 are left to padding and other special tokens."""
    return torch.randint(4, VOCABULARY, (rows, columns), generator=generator)


def _padded(generator: torch.Generator, columns: int = 12) -> Batch:
    """Two sentences, the second three tokens shorter."""
    tokens, mask = _words(generator, columns=columns), torch.ones(2, columns, dtype=torch.long)
    tokens[1, -3:], mask[1, -3:] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def masked_words(generator: torch.Generator, columns: int = 12) -> Batch:
    """Sentences of which every third word is to be guessed."""
    batch = _padded(generator, columns)
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[:, ::3] = batch["input_ids"][:, ::3]
    return batch | {"labels": labels}


def focused_words(generator: torch.Generator) -> Batch:
    """The same, with one word that all others attend to."""
    batch = masked_words(generator)
    focus = torch.zeros_like(batch["input_ids"])
    focus[:, 0] = 1
    return batch | {"global_attention_mask": focus}


def unmasked_words(generator: torch.Generator) -> Batch:
    """The same, for models that take no attention mask."""
    batch = masked_words(generator)
    return {name: batch[name] for name in ("input_ids", "labels")}


def classified_sentences(generator: torch.Generator) -> Batch:
    return _padded(generator) | {"labels": torch.randint(0, 2, (2,), generator=generator)}


def detected_words(generator: torch.Generator) -> Batch:
    return _padded(generator) | {"labels": torch.randint(0, 2, (2, 12), generator=generator)}


def answered_questions(generator: torch.Generator) -> Batch:
    start = torch.randint(0, 5, (2,), generator=generator)
    return _padded(generator) | {"start_positions": start, "end_positions": start + 2}


def text(generator: torch.Generator) -> Batch:
    """Text to continue; the first words carry no loss."""
    tokens = _words(generator)
    labels = tokens.clone()
    labels[:, :2] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def translations(generator: torch.Generator) -> Batch:
    return _padded(generator) | {"labels": _words(generator, columns=7)}


def pictures(generator: torch.Generator, side: int = 16) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, side, side, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def segmented_pictures(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 5, (2, 32, 32), generator=generator),
    }


def captioned_pictures(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return _padded(generator) | {"pixel_values": pixels}


def _contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def _balanced_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss with the router's share, which wants the experts evenly used."""
    loss: Tensor = model(**batch, output_router_logits=True).loss
    return loss


def spoken_letters(generator: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(2, 400, generator=generator),
        "labels": torch.randint(3, 32, (2, 4), generator=generator),
    }


def transcribed_speech(generator: torch.Generator) -> Batch:
    features = torch.randn(2, 8, 32, generator=generator)
    return {"input_features": features, "labels": _words(generator, columns=6)}


def labelled_sounds(generator: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(2, 24, 16, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def text_prompt(generator: torch.Generator) -> Batch:
    """Two prompts of unequal length, padded on the left as generation wants it."""
    tokens, mask = _words(generator, columns=6), torch.ones(2, 6, dtype=torch.long)
    tokens[1, :2], mask[1, :2] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def sentence_prompt(generator: torch.Generator) -> Batch:
    return _padded(generator)


def speech_prompt(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=generator)}


def _construct(model: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    with warnings.catch_warnings():
        # DeBERTa's module is scripted when it is imported.
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        architecture = getattr(transformers, model)
    network: nn.Module = architecture(architecture.config_class(**options))
    return network


def _entry(
    name: str,
    family: str,
    model: str,
    options: dict[str, Any],
    batch: Callable[[torch.Generator], Batch],
    *,
    loss: Loss = own_loss,
    clip_norm: float | None = None,
    prompt: Callable[[torch.Generator], Batch] | None = None,
    strategies: tuple[str, ...] | None = None,
    experts: str | None = None,
) -> Entry:
    if strategies is None:
        strategies = ("greedy",) if prompt else ()
    make = partial(_construct, model, options)
    return Entry(
        name,
        family,
        make,
        batch,
        (Phase(loss),),
        clip_norm=clip_norm,
        draw_prompt=prompt,
        strategies=strategies,
        experts=experts,
    )


_encoder = partial(_entry, family="encoder")
_decoder = partial(_entry, family="decoder", batch=text, prompt=text_prompt)
_pair = partial(_entry, family="encoder-decoder", batch=translations, prompt=sentence_prompt)
# While it generates, transformers multiplies experts in another way wherever the device is not
# called "cpu". The way is fixed here, so that eager and lazy run the same program.
_experts = partial(
    _entry,
    family="mixture of experts",
    batch=text,
    prompt=text_prompt,
    experts="batched_mm",
)
_states = partial(_entry, family="state space", batch=text, prompt=text_prompt)
_vision = partial(_entry, family="vision", batch=pictures)
_audio = partial(_entry, family="audio")

ENCODERS = (
    _encoder("bert", model="BertForMaskedLM", options=WIDTH, batch=masked_words, clip_norm=1.0),
    _encoder(
        "roberta",
        model="RobertaForSequenceClassification",
        options=WIDTH,
        batch=classified_sentences,
    ),
    _encoder(
        "distilbert",
        model="DistilBertForQuestionAnswering",
        options={
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
        },
        batch=answered_questions,
    ),
    _encoder(
        "electra",
        model="ElectraForPreTraining",
        options=WIDTH | {"embedding_size": 16},
        batch=detected_words,
    ),
    _encoder(
        "albert",
        model="AlbertForSequenceClassification",
        options=WIDTH | {"embedding_size": 16},
        batch=classified_sentences,
        clip_norm=1.0,
    ),
    _encoder(
        "deberta_v2",
        model="DebertaV2ForMaskedLM",
        options=WIDTH
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        },
        batch=masked_words,
    ),
    _encoder(
        "modernbert",
        model="ModernBertForMaskedLM",
        options=DECODER | {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 4},
        batch=masked_words,
    ),
    _encoder(
        "longformer",
        model="LongformerForMaskedLM",
        options=WIDTH | {"attention_window": 4},
        batch=focused_words,
    ),
    _encoder(
        "fnet",
        model="FNetForMaskedLM",
        options={k: v for k, v in WIDTH.items() if k != "num_attention_heads"},
        batch=unmasked_words,
    ),
)

DECODERS = (
    _decoder(
        "gpt2",
        model="GPT2LMHeadModel",
        options=SPECIAL
        | {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        clip_norm=1.0,
        strategies=("greedy", "sample"),
    ),
    _decoder("gpt_neox", model="GPTNeoXForCausalLM", options=DECODER),
    _decoder(
        "llama",
        model="LlamaForCausalLM",
        options=GROUPED,
        clip_norm=1.0,
        strategies=("greedy", "sample", "beam"),
    ),
    _decoder("mistral", model="MistralForCausalLM", options=GROUPED | {"sliding_window": 5}),
    _decoder("qwen2", model="Qwen2ForCausalLM", options=GROUPED),
    _decoder("qwen3", model="Qwen3ForCausalLM", options=GROUPED | {"head_dim": 8}),
    _decoder("gemma", model="GemmaForCausalLM", options=GROUPED | {"head_dim": 8}),
    _decoder(
        "gemma2",
        model="Gemma2ForCausalLM",
        options=GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    ),
    _decoder("phi", model="PhiForCausalLM", options=DECODER),
    _decoder(
        "opt",
        model="OPTForCausalLM",
        options={k: v for k, v in DECODER.items() if k != "intermediate_size"}
        | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    _decoder(
        "bloom",
        model="BloomForCausalLM",
        options=SPECIAL
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
    ),
    _decoder("falcon", model="FalconForCausalLM", options=DECODER | {"alibi": True}),
)

PAIRS = (
    _pair(
        "t5",
        model="T5ForConditionalGeneration",
        options=SPECIAL
        | {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        clip_norm=1.0,
        strategies=("greedy", "sample"),
    ),
    _pair(
        "bart",
        model="BartForConditionalGeneration",
        options=PAIRED | {"forced_eos_token_id": 1},
        strategies=("greedy", "beam"),
    ),
    _pair("marian", model="MarianMTModel", options=PAIRED | {"decoder_vocab_size": VOCABULARY}),
    _pair("pegasus", model="PegasusForConditionalGeneration", options=PAIRED),
)

EXPERTS = (
    _experts(
        "mixtral",
        model="MixtralForCausalLM",
        options=GROUPED | {"num_local_experts": 4},
        loss=_balanced_loss,
        clip_norm=1.0,
    ),
    _experts(
        "qwen2_moe",
        model="Qwen2MoeForCausalLM",
        options=GROUPED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    _experts(
        "switch_transformers",
        model="SwitchTransformersForConditionalGeneration",
        options=SPECIAL
        | {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "num_experts": 4,
            "expert_capacity": 8,
            "decoder_start_token_id": 0,
        },
        batch=translations,
        prompt=sentence_prompt,
        experts=None,
    ),
)

STATE_SPACES = (
    _states(
        "mamba",
        model="MambaForCausalLM",
        options=SPECIAL
        | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    _states(
        "mamba2",
        model="Mamba2ForCausalLM",
        options=SPECIAL
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    _states(
        "rwkv",
        model="RwkvForCausalLM",
        options=SPECIAL
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "context_length": 64,
        },
    ),
    _states(
        "recurrent_gemma",
        model="RecurrentGemmaForCausalLM",
        options=GROUPED
        | {"num_hidden_layers": 3, "head_dim": 8, "lru_width": 32, "attention_window_size": 5},
    ),
)

VISION = (
    _vision("vit", model="ViTForImageClassification", options=PATCHES, clip_norm=1.0),
    _vision("deit", model="DeiTForImageClassification", options=PATCHES),
    _vision(
        "dinov2",
        model="Dinov2ForImageClassification",
        options={k: v for k, v in PATCHES.items() if k != "intermediate_size"}
        | {"mlp_ratio": 2, "drop_path_rate": 0.2},
    ),
    _vision(
        "swin",
        model="SwinForImageClassification",
        options={
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    _vision(
        "convnext",
        model="ConvNextForImageClassification",
        options={
            "num_stages": 2,
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "drop_path_rate": 0.2,
            "num_labels": 5,
        },
    ),
    _vision(
        "resnet",
        model="ResNetForImageClassification",
        options={
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "layer_type": "basic",
            "num_labels": 5,
        },
        batch=partial(pictures, side=24),
        clip_norm=1.0,
    ),
    _vision(
        "segformer",
        model="SegformerForSemanticSegmentation",
        options={
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 2],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 5,
        },
        batch=segmented_pictures,
    ),
    _vision(
        "clip",
        family="vision and text",
        model="CLIPModel",
        options={
            "text_config": WIDTH | {"bos_token_id": 2, "eos_token_id": 3, "projection_dim": 16},
            "vision_config": {k: v for k, v in PATCHES.items() if k != "num_labels"}
            | {"projection_dim": 16},
            "projection_dim": 16,
        },
        batch=captioned_pictures,
        loss=_contrastive_loss,
    ),
)

AUDIO = (
    _audio(
        "whisper",
        model="WhisperForConditionalGeneration",
        options={k: v for k, v in PAIRED.items() if k != "max_position_embeddings"}
        | {
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
        batch=transcribed_speech,
        prompt=speech_prompt,
        clip_norm=1.0,
    ),
    _audio(
        "wav2vec2",
        model="Wav2Vec2ForCTC",
        options={
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [8, 4],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_length": 3,
        },
        batch=spoken_letters,
        clip_norm=1.0,
    ),
    _audio(
        "audio_spectrogram_transformer",
        model="ASTForAudioClassification",
        options={k: v for k, v in PATCHES.items() if k not in ("image_size",)}
        | {
            "max_length": 24,
            "num_mel_bins": 16,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
        },
        batch=labelled_sounds,
    ),
)

ARCHITECTURES: tuple[Entry, ...] = (
    *ENCODERS,
    *DECODERS,
    *PAIRS,
    *EXPERTS,
    *STATE_SPACES,
    *VISION,
    *AUDIO,
)
