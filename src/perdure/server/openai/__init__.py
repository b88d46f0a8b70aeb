"""The OpenAI face: Responses and Conversations over sessions, as OpenAI's own clients speak them."""
