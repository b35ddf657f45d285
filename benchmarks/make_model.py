"""Write a random-weight Llama checkpoint of a real size, so that every peer loads the same files.

usage: make_model.py NAME DIR     NAME: llama-1b | llama-3b | llama-8b | qwen3-4b | tiny
"""

import sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

rope3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
rope31 = dict(rope3, factor=8.0)
common = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "pad_token_id": 128004,
}
SIZES = {
    "llama-1b": lambda: LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        rope_parameters=rope3,
        **common,
    ),
    "llama-3b": lambda: LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_parameters=rope3,
        **common,
    ),
    "llama-8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        rope_parameters=rope31,
        **common,
    ),
    "tiny": lambda: LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        vocab_size=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        rms_norm_eps=1e-5,
    ),
}
name, out = sys.argv[1:3]
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.device(device):
    prev = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(SIZES[name](), dtype=torch.bfloat16)
    torch.set_default_dtype(prev)
model.save_pretrained(out, max_shard_size="4GB")

# A tokenizer so that every loader is content: byte-level, with the config's vocabulary size padded by reserved tokens.
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
from transformers import PreTrainedTokenizerFast

alphabet = pre_tokenizers.ByteLevel.alphabet()
special = ["<|begin_of_text|>", "<|eot_id|>", "<|pad|>"]
vocab = {t: i for i, t in enumerate(sorted(alphabet))}
tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tok.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=special[0], eos_token=special[1], pad_token=special[2])
fast.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
fast.save_pretrained(out)
print("saved", name, sum(p.numel() for p in model.parameters()) / 1e9, "B params")
