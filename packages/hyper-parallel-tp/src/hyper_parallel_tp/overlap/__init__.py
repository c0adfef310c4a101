"""Linear layers that compute while they communicate."""
