"""Evaluate causal language models of Transformers, including those of this package.

niah        RULER's needle-in-a-haystack tasks      ar_hits     tokens that only a memory can predict
perplexity  perplexity by context length            generation  greedy generation in batches
text        text to evaluate on                     tokens      prompts as tokens, for any tokenizer
"""
