"""JigsawRL: RL post-training of language models, several pipelines on the same devices at once.

This package is the library. The programs (``services/``) and the tools (``loadgen/``) import it;
it never imports them.
"""

__version__ = "0.1.0"
