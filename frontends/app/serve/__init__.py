"""An HTTP server for one model, with the protocol of OpenAI's API: `weft serve`.

`protocol` reads requests and writes responses, `engine` lets the model answer them, the files beside them are the
application and its server. Never here: arithmetic of models, what a Python caller of the runtime would want too.
"""
