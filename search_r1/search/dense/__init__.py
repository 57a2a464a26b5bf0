"""Dense retrieval: vectors, exact and FAISS indexes, their builders."""
