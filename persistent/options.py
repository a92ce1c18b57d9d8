"""The switches that `persistent` declares, beside those of `fused` that it knows."""

OPTIONS = {
    "stationary": "Let a block walk a whole sequence of one head, whose state never leaves its registers. Off, let as many "
                  "blocks as run side by side take the chunks of the two-level scan in turn.",
    "segments": "With stationary, and in the backward on Hopper, cut sequences where batch and heads alone do not fill the "
                "GPU. Off, never cut.",
}
