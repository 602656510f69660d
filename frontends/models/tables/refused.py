"""Types of transformers that no table describes, and why."""

REFUSED = {
    "deepseek_v4": "its attention chooses keys by scores of their own, which no module does",
    "deepseek_v32": "its attention chooses keys by scores of their own, which no module does",
    "glm_moe_dsa": "its attention chooses keys by scores of their own, which no module does",
    "nllb-moe": "transformers 5.23 sends every token to experts 0 and 1, so there is nothing to compare with",
    "nystromformer": "its landmarks are means over texts of one length",
    "prophetnet": "no module has its streams of n-grams",
    "roc_bert": "its tokens have shapes and sounds, which would be inputs of their own",
}
