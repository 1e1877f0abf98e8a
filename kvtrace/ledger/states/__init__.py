"""States of Mamba and linear attention: a book of their own, beside those of tokens."""
