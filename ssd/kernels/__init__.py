"""The baseline kernels, one stage a file, named as the stages of docs/ssd.md."""
