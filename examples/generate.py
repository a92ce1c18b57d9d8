"""Prefill a prompt and decode token by token, by hand and by `generate`; then draw tokens, for prompts of unequal lengths."""

import torch

from ssd.modules import Mamba2LM, Mamba2LMConfig

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = Mamba2LMConfig(d_model=64, n_layer=2, vocab_size=100,
                        ssm_cfg={"layer": "Mamba2", "headdim": 32, "d_state": 32, "chunk_size": 32})
model = Mamba2LM(config, device=device).eval()  # Mamba2LM.from_pretrained("mamba2-130m") reads a folder of weights
prompt = torch.randint(100, (1, 50), device=device)

with torch.no_grad():
    cache = model.new_cache(batch=1)
    logits = model(prompt, cache=cache)[:, -1]  # prefill: one call, which leaves the state in the cache
    generated = []
    for _ in range(10):  # decode: one token a call, at a cost that does not grow with the context
        token = logits[:, :100].argmax(-1)
        generated.append(token.item())
        logits = model.step(token, cache)

print("by hand:          ", generated)
print("model.generate(): ", model.generate(prompt, max_new_tokens=10)[0, 50:].tolist())

# drawn tokens, one after another; the same again with the same seed
rng = torch.Generator(device).manual_seed(0)
print("drawn:            ", end=" ")
for token in model.stream(prompt, max_new_tokens=10, temperature=0.8, top_k=50, top_p=0.95, generator=rng, eos_token_id=0):
    print(token.item(), end=" ", flush=True)
print()

# two prompts, of 50 and of 20 tokens: the mask says where tokens are
prompts = torch.zeros(2, 50, dtype=torch.int64, device=device)
prompts[0], prompts[1, :20] = prompt[0], prompt[0, :20]
mask = torch.ones_like(prompts)
mask[1, 20:] = 0
print("of two prompts:   ", model.generate(prompts, max_new_tokens=10, attention_mask=mask)[:, 50:].tolist())
print("the second alone: ", model.generate(prompt[:, :20], max_new_tokens=10)[0, 20:].tolist())
