"""Every file that outlives a run: baselines, predictions, published tables, reports and the history. Gate judges them."""
