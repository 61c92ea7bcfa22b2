// Reads batches of a service: client HOST PORT CONFIG.json FIRST COUNT
// Prints each batch's number, its rows, and for each feature its values' number, sum and last one.
#include <arrow/api.h>
#include <arrow/compute/cast.h>
#include <arrow/flight/api.h>

#include <fstream>
#include <iostream>
#include <sstream>

namespace flight = arrow::flight;

arrow::Status Run(char** words) {
  std::stringstream config;
  config << std::ifstream(words[3]).rdbuf();
  ARROW_ASSIGN_OR_RAISE(auto place, flight::Location::ForGrpcTcp(words[1], std::stoi(words[2])));
  ARROW_ASSIGN_OR_RAISE(auto client, flight::FlightClient::Connect(place));
  flight::Ticket ticket{"{\"config\": " + config.str() + ", \"first\": " + words[4] +
                        ", \"count\": " + words[5] + "}"};
  ARROW_ASSIGN_OR_RAISE(auto stream, client->DoGet(ticket));
  while (true) {
    ARROW_ASSIGN_OR_RAISE(auto chunk, stream->Next());
    if (!chunk.data) return arrow::Status::OK();
    std::cout << chunk.app_metadata->ToString() << " " << chunk.data->num_rows() << " rows\n";
    for (int i = 0; i < chunk.data->num_columns(); ++i) {
      std::shared_ptr<arrow::Array> column = chunk.data->column(i);
      while (auto* lists = dynamic_cast<arrow::FixedSizeListArray*>(column.get()))
        column = lists->values();
      ARROW_ASSIGN_OR_RAISE(column, arrow::compute::Cast(*column, arrow::int32()));  // from uint16
      auto values = std::static_pointer_cast<arrow::Int32Array>(column);
      int64_t sum = 0;
      for (int64_t j = 0; j < values->length(); ++j) sum += values->Value(j);
      std::cout << chunk.data->column_name(i) << " " << values->length() << " " << sum << " "
                << values->Value(values->length() - 1) << "\n";
    }
  }
}

int main(int, char** words) {
  arrow::Status status = Run(words);
  if (!status.ok()) std::cerr << status.message() << "\n";
  return status.ok() ? 0 : 1;
}
