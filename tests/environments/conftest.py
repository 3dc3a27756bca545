"""A BM25 index of three documents."""

import pytest

from megatron_stppo.environments.retrieval import BM25Retriever

CORPUS = [
    {"id": "0", "contents": '"Gabon"\nGabon: capital Libreville.'},
    {"id": "1", "contents": '"France"\nFrance: capital Paris, largest neighbour Spain.'},
    {"id": "2", "contents": '"Spain"\nSpain: capital Madrid.'},
]


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bm25") / "index"
    BM25Retriever.build(CORPUS, folder)
    return folder
