"""Prompts: templates, tokens and text. `Renderer` is the door."""

from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.renderer import Renderer

__all__ = ["Detokenizer", "Renderer"]
