"""An HTTP server for one model, with the protocol of OpenAI's API: `weft serve`.

`protocol` reads requests and writes responses, `engine` computes the answers, the other files are the
application and its server. Never here: arithmetic of models, features that Python callers of the runtime also need.
"""
