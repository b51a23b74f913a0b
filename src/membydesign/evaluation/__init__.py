"""What a language model can do: RULER's needles in haystacks, and perplexity by context length.

Every causal language model of Transformers can be measured, ours among them.

niah          the six tasks, and samples for any tokenizer and length     perplexity  by window length
niah_run      a model's answers, scored and kept                          generation  greedy, in batches
niah_scores   scores by task, length and depth, and differences           tokens      what a tokenizer makes of a text
"""
