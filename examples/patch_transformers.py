"""Run a model of transformers on these kernels. The weights are random and small, so that nothing is downloaded."""

import torch
from transformers import FalconH1Config, FalconH1ForCausalLM

import ssd

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = FalconH1Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16,
                        mamba_n_groups=2, mamba_chunk_size=16)
model = FalconH1ForCausalLM(config).to(device)
tokens = torch.randint(64, (1, 40), device=device)

before = model(tokens).logits
with ssd.patch_transformers():  # or a plain call, which lasts until .undo()
    print("patched:", ssd.patched())
    after = model(tokens).logits
    model(tokens, labels=tokens).loss.backward()

print(f"largest difference of the logits: {(after - before).abs().max().item():.1e}")
