"""The application: functions for Python, the command line, the HTTP server.

Never here: how sources are read or written; rewrites, code generation.
"""
