"""What every tokenising process needs, imported once by the server that they are forked from."""

from transformers.utils import chat_template_utils

from headframe_worker.prepare import encoder

__all__ = ["chat_template_utils", "encoder"]
