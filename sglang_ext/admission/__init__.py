"""What a request may ask for, checked in the HTTP process, before a scheduler sees it.

SGLang 0.5.23 leaves many fields unchecked, and its scheduler ends with the first exception that a
request provokes, for all clients (docs/security.md lists them). Here each is a 400.
"""
