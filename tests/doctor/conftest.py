"""A vLLM of a few modules: what breaks in the look at it does so at once, and on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_in import write_sources

BASE = """
from abc import ABC, abstractmethod

class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): pass

class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role, kv_cache_config): pass
    @abstractmethod
    def start_load_kv(self, forward_context, **kwargs): pass
    @abstractmethod
    def wait_for_layer_load(self, layer_name): pass
    @abstractmethod
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): pass
    @abstractmethod
    def wait_for_save(self): pass
    @abstractmethod
    def update_state_after_alloc(self, request, blocks, num_external_tokens): pass
    def handle_preemptions(self, kv_connector_metadata): return
    def request_finished(self, request, block_ids): return False, None
    def reset(self, hard=False): return
    def role(self): return 1
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config): return False
"""
FACTORY = """
import importlib

class KVConnectorFactory:
    @classmethod
    def get_connector_class(cls, config):
        if not config.kv_connector_module_path:
            raise ValueError(f"Unsupported connector type: {config.kv_connector}")
        return getattr(importlib.import_module(config.kv_connector_module_path), config.kv_connector)
"""
CONFIG = """
from dataclasses import dataclass, field

@dataclass
class KVTransferConfig:
    kv_connector: str = None
    kv_connector_module_path: str = None
    kv_role: str = None
    kv_connector_extra_config: dict = field(default_factory=dict)
"""
CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
SOURCES = {
    "vllm/__init__.py": '__version__ = "0.32.0"\n',
    "vllm/plugins/__init__.py": "def load_general_plugins(): pass\n",
    "vllm/config.py": CONFIG,
    f"{CONNECTORS}/factory.py": FACTORY,
    f"{CONNECTORS}/v1/__init__.py": "def supports_hma(cls): return False\n",
    f"{CONNECTORS}/v1/base.py": BASE,
}


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """The folder that the stand-in for vLLM lies in; connectors go beside it."""
    return write_sources(tmp_path / "site", SOURCES)
