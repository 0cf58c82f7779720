"""What only CUDA needs: graphs by width, staging, masks, FlashInfer beside encoder tokens."""
