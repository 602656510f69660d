"""Pages that follow an architecture file: the server of `weft viz --watch`, and the data that it sends.

Never here: drawing (weft.backends.viz, api/draw), servers of models (serve/).
"""
