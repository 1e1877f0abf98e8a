"""What several rules have in common: counts, inferences and the words for them."""
