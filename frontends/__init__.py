"""Where a graph comes from: the DSL and its presets, Hugging Face folders, GGUF files, and the command line.

Never here: rewrites, lowerings, anything a target decides; a model family is a table here, not a class.
"""

if __name__ == "frontends":
    raise ImportError("import weft.frontends, not frontends: the bare name makes a second copy of every class")
