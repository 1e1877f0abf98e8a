"""vLLM's ExampleConnector, and what a connector of two engines does beside: it hands a request over by id."""

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class HandsOver(ExampleConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._engine = vllm_config.kv_transfer_config.engine_id

    def request_finished(self, request, block_ids):
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        ids = {"remote_engine_id": self._engine, "remote_request_id": request.request_id}
        return False, {"do_remote_prefill": True, "do_remote_decode": False, **ids, "remote_host": "10.0.0.1"}
