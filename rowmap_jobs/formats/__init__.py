"""Every artifact that passes between the parts: models, readers and names.

Modules here import pydantic and the standard library; `census` alone imports numpy.
"""
