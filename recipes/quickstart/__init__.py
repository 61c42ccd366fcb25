"""The quickstart: a small vision-language model learns to name drawings, on two processes of one machine."""
