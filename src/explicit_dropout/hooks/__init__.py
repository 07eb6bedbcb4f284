"""What runs inside a model's forward pass: hooks that compute penalties, and the place where their terms wait."""
