"""What a language model can do: RULER's needles in haystacks, perplexity by context length and on AR-hits.

Every causal language model of Transformers can be measured, ours among them.

niah          the six tasks, and samples for any tokenizer and length     perplexity  by window length
niah_run      a model's answers, scored and kept                          generation  greedy, in batches
niah_scores   scores by task, length and depth, and differences           tokens      what a tokenizer makes of a text
ar_hits       tokens that only a memory knows, and slices of losses
"""
