"""Perdure inside vLLM: `kv_connector` "PerdureConnector", `kv_connector_module_path` "perdure.engines.vllm"."""
