"""The application: functions for Python, the command line, the HTTP server.

Never here: readers and writers of sources; rewrites, code generation.
"""
